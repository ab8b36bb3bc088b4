"""Build the book: execute what is stale, collect the claims, stage, render, and only then replace the last good site.

python book/build.py                     # quick scale, whole book
python book/build.py --scale full        # the paper-like scale
python book/build.py --only 2-2-score-decomposition -p seed=1    # run one chapter with other parameters, no site
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ledger
import yaml
from execute import ROOT, BuildError, chapters, execute, plan, toc_files
from site_html import finish
from stage import stage


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line and return the exit status."""
    options = _parse(arguments)
    started = time.monotonic()
    try:
        if options.only:
            run_chapters(options.only, options.scale, options.parameters, options.jobs, root)
            return 0
        build_book(options.scale, options.parameters, options.jobs, root)
    except (BuildError, ledger.LedgerError) as problem:
        print(f"\nThe book was not built. {problem}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - started:.0f} s in all")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=("quick", "full"), default="quick")
    parser.add_argument("--jobs", type=int, default=2, help="chapters run at a time (default 2, one thread each)")
    parser.add_argument("--only", nargs="+", metavar="CHAPTER", help="execute these chapters, build no site")
    parser.add_argument("-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE", type=_parameter)
    options = parser.parse_args(arguments)
    options.parameters = dict(options.parameters)
    return options


def _parameter(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, yaml.safe_load(value)


def run_chapters(names: list[str], scale: str, parameters: dict, workers: int, root: Path = ROOT) -> dict[str, Path]:
    """Execute the stale ones among these chapters; where each executed notebook lies.

    :raises BuildError: a chapter failed; names notebook, cell and claim. The other chapters have run.
    """
    jobs, stale = plan(names, scale, parameters, root)
    print(f"{len(stale)} of {len(jobs)} chapters to run ({scale} scale)", flush=True)
    failures = [outcome for outcome in execute(stale, workers, root) if outcome.error]
    if failures:
        lines = [f"  - {o.error}\n    partly executed copy: {o.path.relative_to(root)}" for o in failures]
        raise BuildError(f"{len(failures)} of {len(stale)} chapters failed:\n" + "\n".join(lines))
    return {job.name: job.target for job in jobs}


def build_book(scale: str, parameters: dict, workers: int, root: Path = ROOT) -> Path:
    """The whole way from text notebooks to ``_build/html``; returns the index page."""
    entries = ledger.read_registry(root / "book" / "statements.yml")
    names = chapters(root)
    executed = run_chapters(names, scale, parameters, workers, root)
    records = ledger.collect(executed.values())
    book = ledger.build(entries, records, names)
    key, stamp = site_key(executed, root), root / "_build" / "site.key"
    index = root / "_build" / "html" / "index.html"
    if not (index.exists() and stamp.exists() and stamp.read_text() == key):
        source = stage(book, executed, commit(root), root)
        (source / "book" / "_static" / "claims.csv").write_text(ledger.as_csv(book, commit(root)))
        site = render(source, root)
        finish(site, toc_files(root))
        publish(site, index.parent)
        stamp.write_text(key)
    print(f"\n{ledger.summary(book)}\n{index}")
    return index


def site_key(executed: dict[str, Path], root: Path = ROOT) -> str:
    """Fingerprint of everything the site is made of; the same key means the last site is still right."""
    sources = [path for folder in ("book", "ditbook") for path in (root / folder).rglob("*")]
    sources += [root / "_config.yml", root / "_toc.yml", root / "requirements.lock", *executed.values()]
    digest = hashlib.sha256(commit(root).encode())
    for path in sorted(path for path in sources if path.is_file() and "__pycache__" not in path.parts):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def render(source: Path, root: Path = ROOT) -> Path:
    """Run Jupyter Book on the staged folder, warnings as errors; the site in a folder of its own.

    :raises BuildError: Sphinx warned or failed.
    """
    build = root / "_build"
    output = build / "site"
    shutil.rmtree(output, ignore_errors=True)
    tool = Path(sys.executable).with_name("jupyter-book")
    command = [str(tool), "build", str(source), "--path-output", str(output), "-n", "-W", "--keep-going", "-q"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(root)})
    (build / "sphinx.log").write_text(result.stdout + result.stderr)
    if result.returncode:
        text = re.sub(r"\x1b\[[\d;]*m", "", result.stderr)
        lines = [line for line in text.splitlines() if "WARNING" in line or "ERROR" in line]
        raise BuildError(
            "Sphinx did not accept the pages (_build/sphinx.log):\n" + "\n".join(lines or [result.stderr[-2000:]])
        )
    return output / "_build" / "html"


def publish(site: Path, target: Path) -> None:
    """Replace the last good site by the new one."""
    shutil.rmtree(target, ignore_errors=True)
    site.replace(target)


def commit(root: Path = ROOT) -> str:
    """The commit the numbers belong to, marked when the tree had changes; ``unknown`` outside a checkout."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(describe, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
