"""What the benchmarks share: committed rows of ``results.csv``, verdicts, memory."""

import csv
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

THREADS = 2
RESULTS = Path(__file__).with_name("results.csv")
COLUMNS = ["benchmark", "method", "L", "d", "B", "quantity", "value", "note", "machine", "versions", "commit"]


class Record:
    """Rows of one benchmark in ``results.csv``, written at once; those of other benchmarks stay.

    :param sources: files the measurements depend on. Rows of this benchmark are kept, so that a run that was stopped
        can go on, while the last commit of these files, the machine and the versions are the same.
    :param resume: False drops the rows of this benchmark all the same.
    """

    def __init__(self, benchmark: str, sources: Sequence[str], resume: bool = True):
        self.benchmark = benchmark
        self.origin = {"machine": machine(), "versions": versions(), "commit": last_commit(sources)}
        rows = list(csv.DictReader(RESULTS.open())) if RESULTS.exists() else []
        self.rows = [
            row
            for row in rows
            if row["benchmark"] != benchmark
            or (resume and all(row[name] == value for name, value in self.origin.items()))
        ]

    def get(self, method: str, L: int, d: int, B: float, quantity: str) -> float | None:
        """A recorded value of this benchmark."""
        key = [self.benchmark, method, str(L), str(d), str(B), quantity]
        return next((float(row["value"]) for row in self.rows if [row[c] for c in COLUMNS[:6]] == key), None)

    def add(self, method: str, L: int, d: int, B: float, note: str = "", **quantities: float) -> None:
        for quantity, value in quantities.items():
            row = [self.benchmark, method, L, d, B, quantity, f"{value:.5g}", note, *self.origin.values()]
            self.rows.append(dict(zip(COLUMNS, map(str, row), strict=True)))
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def machine(threads: int = THREADS) -> str:
    """The processor's model, its cores, the threads in use by one process; no name of the host."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.machine())}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}"


def versions() -> str:
    return f"python {platform.python_version()}, torch {torch.__version__.split('+')[0]}"


def last_commit(sources: Sequence[str]) -> str:
    command = ["git", "log", "-1", "--format=%h", "--", *sources]
    found = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent)
    return found.stdout.strip() or "unknown"


def verdict(what: str, value: float, bar: float, at_least: bool) -> None:
    met = value >= bar if at_least else value <= bar
    print(f"{'met' if met else 'MISSED':6s} {what}: {value:.3g} ({'at least' if at_least else 'at most'} {bar:g})")


def resident() -> int:
    """Largest resident size of this process so far, bytes (Linux counts KiB, macOS bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def extra_memory(script: str, *case: float) -> float:
    """GiB that one call adds to inputs and libraries: what ``script --memory CASE`` prints, in its own process."""
    command = [sys.executable, script, "--memory", *map(str, case)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 2**30
