"""Time and memory of whole runs, kept in ``book/_static/runs.csv`` for the page on execution status.

``_runs.py bench`` runs all benchmarks, two threads each (``make bench``); ``_runs.py full`` reads what the chapters of
the last full-scale book took (``make full``). Each replaces its own rows only.
"""

import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import nbformat
from _common import THREADS, last_commit, machine, versions

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "book" / "_static" / "runs.csv"
PROCESS_THREADS = {"bench": THREADS, "full": 1}
COLUMNS = ["kind", "name", "seconds", "peak_mib", "note", "machine", "versions", "commit"]
UNIT = 2**20 if sys.platform == "darwin" else 2**10  # of a peak resident size, per MiB


def benchmarks() -> Iterable[list]:
    """Run every benchmark, show what it prints, and yield its row: the note counts the bars that were met."""
    for script in sorted(ROOT.glob("benchmarks/[a-z]*.py")):
        print(f"== {script.name}", flush=True)
        started, lines = time.monotonic(), []
        environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        # Not process.wait(): this one tells the peak of the process and of those it waited for.
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{script.name} failed; its rows in {RUNS.name} are those of an earlier run")
        met, missed = (sum(line.startswith(word) for line in lines) for word in ("met ", "MISSED "))
        note = f"{met} of {met + missed} bars met"
        yield [script.stem, round(time.monotonic() - started), round(usage.ru_maxrss / UNIT), note]


def chapters() -> Iterable[list]:
    """What the executed notebooks say of their own runs."""
    found = sorted((ROOT / "_build" / "executed" / "full").glob("*.ipynb"))
    if not found:
        raise SystemExit("no full-scale run below _build; run make full first")
    for path in found:
        run = nbformat.read(path, as_version=4).metadata["ditbook"]
        yield [path.stem, round(run["seconds"]), run["peak_mib"], "two chapters at a time"]


def record(kind: str, found: Iterable[list]) -> None:
    """Write each row as soon as it is known, in the place of an earlier one of the same kind and name."""
    kept = list(csv.DictReader(RUNS.open())) if RUNS.exists() else []
    rows = {(row["kind"], row["name"]): row for row in kept}
    commit = last_commit([":/ditbook", ":/notebooks", ":/benchmarks/*.py"])
    origin = [machine(PROCESS_THREADS[kind]), versions(), commit]
    for name, *values in found:
        rows[kind, name] = dict(zip(COLUMNS, [kind, name, *values, *origin], strict=True))
        with RUNS.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[key] for key in sorted(rows))


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else ""
    if kind not in PROCESS_THREADS:
        raise SystemExit(f"expected bench or full, got {kind!r}")
    record(kind, benchmarks() if kind == "bench" else chapters())
