"""Running a chapter twice gives the same claim numbers and the same figures, byte by byte (quality bar 4).

Here on the two fastest chapters of the last `make book`, on every chapter with DITBOOK_REPEAT=all.
"""

import os
import re
from pathlib import Path

import nbformat
import pytest
from execute import Job, chapters, execute
from ledger import records_of

EXECUTED = Path(__file__).parents[1] / "_build" / "executed" / "quick"


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


@pytest.mark.xdist_group("repeat")
def test_a_second_run_gives_the_same_numbers_and_pictures(tmp_path):
    names = chapters() if os.environ.get("DITBOOK_REPEAT") == "all" else fastest(2)
    if not names:
        pytest.skip("no executed chapter; run make book first")
    source = Path(__file__).parents[1] / "notebooks"
    jobs = [
        Job(name, source / f"{name}.md", tmp_path / f"{name}.ipynb", tmp_path / "failed" / name, {"scale": "quick"}, "")
        for name in names
    ]
    assert [outcome.error for outcome in execute(jobs)] == [""] * len(jobs)
    for job in jobs:
        first = results(nbformat.read(EXECUTED / f"{job.name}.ipynb", as_version=4))
        second = results(nbformat.read(job.target, as_version=4))
        assert second == first
        assert first[0]
