"""Running a chapter twice gives the same claim numbers and the same figures, byte by byte (quality bar 4).

Here on the two fastest chapters of the last `make book`; with DITBOOK_REPEAT=quick or =full on every chapter at that
scale (`make full` does so). The second run starts with an empty memo: it trains anew.
"""

import os
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from execute import Job, chapters, execute
from ledger import records_of

from ditbook.claims import RECORD_KEY

ROOT = Path(__file__).parents[1]
WHOLE = os.environ.get("DITBOOK_REPEAT", "")
SCALE = WHOLE or "quick"
EXECUTED = ROOT / "_build" / "executed" / SCALE


def fastest(number: int) -> list[str]:
    """Names of the chapters that took the least time in the last run."""
    seconds = {
        name: nbformat.read(EXECUTED / f"{name}.ipynb", as_version=4).metadata["ditbook"]["seconds"]
        for name in chapters()
        if (EXECUTED / f"{name}.ipynb").exists()
    }
    return sorted(seconds, key=seconds.get)[:number]


def results(notebook) -> tuple[list, dict]:
    """Claim records, and the picture of every figure that does not draw measured time."""
    figures = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            figure = output.get("metadata", {}).get("ditbook_figure")
            if figure and not figure["measured_time"]:
                figures[figure["name"]] = re.search(r"svg\+xml;base64,([^\"]+)", output.data["text/html"])[1]
    return [record for _, record in records_of(notebook)], figures


def copied(folder: Path) -> Path:
    """The notebooks in a folder of their own, where no memo lies, with the measurements that they show."""
    (folder / "pyproject.toml").touch()  # marks the root, below which the memo is kept
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks")
    return shutil.copytree(ROOT / "notebooks", folder / "notebooks")


@pytest.mark.xdist_group("repeat")
def test_a_second_run_gives_the_same_numbers_and_pictures(tmp_path):
    names = chapters() if WHOLE else fastest(2)
    if not names:
        pytest.skip("no executed chapter; run make book first")
    source = copied(tmp_path)
    jobs = [
        Job(name, source / f"{name}.md", tmp_path / f"{name}.ipynb", tmp_path / "failed" / name, {"scale": SCALE}, "")
        for name in names
    ]
    assert [outcome.error for outcome in execute(jobs)] == [""] * len(jobs)
    differ = []
    for job in jobs:
        first, second = (results(nbformat.read(p, as_version=4)) for p in (EXECUTED / job.target.name, job.target))
        assert first[0] or first[1], f"{job.name} has neither checks nor figures"
        if second != first:
            differ.append(job.name)
    assert differ == []


def executed(value: float, svg: str, measured_time: bool = False):
    """A notebook with one claim record and one figure."""
    figure = {"name": "f", "measured_time": measured_time}
    outputs = [
        nbformat.v4.new_output("display_data", metadata={RECORD_KEY: {"id": "a", "value": value}}),
        nbformat.v4.new_output(
            "display_data", {"text/html": f'svg+xml;base64,{svg}"'}, metadata={"ditbook_figure": figure}
        ),
    ]
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=outputs)])


def test_another_number_or_picture_is_seen_and_measured_time_is_exempt():
    assert results(executed(1.0, "AAAA")) == results(executed(1.0, "AAAA"))
    assert results(executed(1.0, "AAAA")) != results(executed(1.0 + 1e-15, "AAAA"))
    assert results(executed(1.0, "AAAA")) != results(executed(1.0, "AAAB"))
    assert results(executed(1.0, "AAAA", True)) == results(executed(1.0, "AAAB", True))
