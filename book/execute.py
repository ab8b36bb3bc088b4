"""Execute the chapters: MyST text -> notebook -> papermill -> executed notebook with claim records.

A chapter is run again only when its source, its parameters, the lock file or a file of `ditbook`
changed; the key of a run is kept in the executed notebook itself, the only artefact that carries results.
"""

import hashlib
import json
import multiprocessing
import os
import platform
import re
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import jupytext
import nbformat
import papermill
import yaml
from papermill.exceptions import PapermillExecutionError

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("torch", "numpy", "scipy", "scikit-learn", "matplotlib", "papermill", "jupyter-book")


class BuildError(Exception):
    """The book cannot be built; the message says what to mend."""


@dataclass(frozen=True)
class Job:
    """One chapter to run: where it comes from, where the result goes, with which parameters."""

    name: str
    source: Path
    target: Path
    failed: Path
    parameters: dict
    key: str


@dataclass(frozen=True)
class Outcome:
    """What became of one job; ``error`` is empty when it ran to its end."""

    name: str
    seconds: float
    error: str = ""
    path: Path | None = field(default=None)


def chapters(root: Path = ROOT) -> list[str]:
    """Names of the notebooks in the table of contents, in its order."""
    return [Path(file).name for file in toc_files(root) if file.startswith("notebooks/")]


def toc_files(root: Path = ROOT) -> list[str]:
    """All files of ``_toc.yml`` in reading order, without suffix."""
    found: list[str] = []

    def walk(node) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                if key in ("root", "file"):
                    found.append(value)
                else:
                    walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(yaml.safe_load((root / "_toc.yml").read_text()))
    return found


def run_key(source: Path, parameters: dict, root: Path = ROOT) -> str:
    """Fingerprint of everything a run of ``source`` depends on."""
    digest = hashlib.sha256()
    files = [source, root / "requirements.lock", *sorted((root / "ditbook").rglob("*.py"))]
    # A chapter that shows committed measurements depends on them too.
    shown = sorted(set(re.findall(r"benchmarks/[\w.-]+\.csv", source.read_text())))
    files += [root / name for name in shown if (root / name).exists()]
    for file in files:
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(json.dumps(parameters, sort_keys=True).encode())
    return digest.hexdigest()


def plan(names: list[str], scale: str, parameters: dict, root: Path = ROOT) -> tuple[list[Job], list[Job]]:
    """All jobs for these chapters, and those among them that must run.

    :raises BuildError: a chapter is missing, or does not know one of the parameters.
    """
    jobs, stale = [], []
    for name in names:
        source = root / "notebooks" / f"{name}.md"
        if not source.exists():
            raise BuildError(f"_toc.yml names notebooks/{name}, but {source.relative_to(root)} does not exist")
        values = {"scale": scale, **parameters}
        _refuse_unknown(name, source, values)
        target = root / "_build" / "executed" / scale / f"{name}.ipynb"
        failed = root / "_build" / "failed" / scale / f"{name}.ipynb"
        job = Job(name, source, target, failed, values, run_key(source, values, root))
        jobs.append(job)
        if not target.exists() or nbformat.read(target, as_version=4).metadata.get("ditbook", {}).get("key") != job.key:
            stale.append(job)
    return jobs, stale


def _refuse_unknown(name: str, source: Path, values: dict) -> None:
    # papermill only warns about a name it does not know, and would run the chapter with the default.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.ipynb"
        nbformat.write(nbformat.from_dict(jupytext.read(source)), path)
        known = set(papermill.inspect_notebook(path))
    unknown = sorted(set(values) - known)
    if unknown:
        expected = ", ".join(sorted(known)) or "none"
        raise BuildError(f"notebooks/{name}.md has no parameter {', '.join(unknown)} (it has: {expected})")


def execute(jobs: list[Job], workers: int = 2, root: Path = ROOT) -> list[Outcome]:
    """Run the jobs, ``workers`` at a time with one thread each; every job runs even if another one fails."""
    if not jobs:
        return []
    _one_thread_each(root)
    outcomes = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        for number, future in enumerate(as_completed(futures), 1):
            outcome = future.result()
            outcomes.append(outcome)
            word = f"FAILED  {outcome.error.splitlines()[0]}" if outcome.error else "done"
            _say(f"[{number}/{len(jobs)}] {outcome.name}: {word}  ({outcome.seconds:.0f} s)")
    return outcomes


def _one_thread_each(root: Path) -> None:
    # Inherited by the kernels: two chapters side by side on two cores, and sums that repeat bit by bit.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["PYTHONHASHSEED"] = "0"
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))


def run(job: Job) -> Outcome:
    """Run one chapter in this process; its executed notebook appears whole or not at all."""
    started = time.monotonic()
    work = job.target.with_suffix(".running.ipynb")
    work.parent.mkdir(parents=True, exist_ok=True)
    job.failed.unlink(missing_ok=True)
    notebook = jupytext.read(job.source)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.from_dict(notebook), work)
    _say(f"{job.name}: started")
    error = ""
    try:
        papermill.execute_notebook(
            work,
            work,
            parameters=job.parameters,
            kernel_name="python3",
            cwd=job.source.parent,
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
            progress_bar={"file": _Lines(job.name), "bar_format": "cell {n_fmt} of {total_fmt}", "mininterval": 10},
        )
    except PapermillExecutionError as failure:
        error = _explain(job.name, failure)
    except Exception as failure:  # a dead kernel, a full disk: the other chapters still run
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.monotonic() - started
    executed = scrub(nbformat.read(work, as_version=4))
    executed.metadata["ditbook"] = {
        "key": "" if error else job.key,
        "parameters": job.parameters,
        "seconds": round(seconds, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / _rss_unit()),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in VERSIONS}},
        "platform": f"{platform.system()} {platform.machine()}",
    }
    target = job.failed if error else job.target
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(executed, work)
    work.replace(target)
    return Outcome(job.name, seconds, error, target)


def _rss_unit() -> int:
    return 2**20 if sys.platform == "darwin" else 2**10


def _explain(name: str, failure: PapermillExecutionError) -> str:
    cell = f"cell {failure.cell_index}" if getattr(failure, "cell_index", None) is not None else "a cell"
    what = "claim " if failure.ename == "ClaimFailed" else f"{failure.ename}: "
    return f"notebooks/{name}.md, {cell} (In [{failure.exec_count}]): {what}{failure.evalue}"


def scrub(notebook):
    """Drop what differs from run to run or names this machine: timestamps, absolute paths, execution state."""
    notebook.metadata.pop("papermill", None)
    cells = []
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        tags = cell.metadata.get("tags", [])
        if "injected-parameters" in tags:
            cell.metadata["tags"] = [*tags, "remove-cell"]
        # Progress bars, and the empty lines they leave, are for the terminal, not for the page.
        if cell.cell_type == "code":
            cell.outputs = [
                o for o in cell.outputs if o.output_type != "stream" or ("\r" not in o.text and o.text.strip())
            ]
        cells.append(cell)
    notebook.cells = cells
    return notebook


class _Lines:
    """A file for tqdm that prints whole lines, so that two chapters can report side by side."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.last = ""

    def write(self, text: str) -> None:
        line = text.strip()
        if line and line != self.last:
            self.last = line
            _say(f"{self.name}: {line}")

    def flush(self) -> None:
        pass


def _say(line: str) -> None:
    print(line, flush=True)
