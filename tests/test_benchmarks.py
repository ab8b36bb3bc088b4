"""benchmarks/_common.py and _runs.py: what a stopped or failing run leaves, and how bars are counted."""

import csv

import _common
import _runs
import pytest


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A folder of tiny benchmarks, and a table of runs with one row of a full-scale book."""
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(_runs, "ROOT", tmp_path)
    monkeypatch.setattr(_runs, "RUNS", tmp_path / "runs.csv")
    _runs.record("full", [["one", 12, 300, "a note"]])
    return tmp_path / "benchmarks"


def rows() -> list[list[str]]:
    return [[row[name] for name in ("kind", "name", "note")] for row in csv.DictReader(_runs.RUNS.open())]


def test_bars_are_counted_and_rows_of_the_other_kind_stay(scripts):
    (scripts / "a.py").write_text("print('met    x: 1')\nprint('MISSED y: 2')\nprint('methods: 3')")
    (scripts / "_common.py").write_text("raise SystemExit('no benchmark')")
    _runs.record("bench", _runs.benchmarks())
    assert rows() == [["bench", "a", "1 of 2 bars met"], ["full", "one", "a note"]]
    bench, full = csv.DictReader(_runs.RUNS.open())
    assert 5 < int(bench["peak_mib"]) < 1000
    assert bench["machine"].endswith("2 threads")
    assert full["machine"].endswith("1 thread")


def test_a_failing_benchmark_is_named_and_costs_no_row(scripts):
    (scripts / "a.py").write_text("print('met    x: 1')")
    (scripts / "b.py").write_text("print('MISSED x: 1')")
    _runs.record("bench", _runs.benchmarks())
    (scripts / "b.py").write_text("raise ValueError")
    with pytest.raises(SystemExit, match=r"b\.py failed"):
        _runs.record("bench", _runs.benchmarks())
    assert rows() == [
        ["bench", "a", "1 of 1 bars met"],
        ["bench", "b", "0 of 1 bars met"],
        ["full", "one", "a note"],
    ]


def test_without_a_full_scale_run_there_is_nothing_to_record(scripts):
    with pytest.raises(SystemExit, match="run make full first"):
        _runs.record("full", _runs.chapters())


def test_a_measurement_of_other_sources_is_dropped_and_other_benchmarks_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(_common, "RESULTS", tmp_path / "results.csv")
    monkeypatch.setattr(_common, "last_commit", lambda sources: sources[0])
    _common.Record("one", ["old"]).add("fast", 8, 4, 0.5, seconds=1.5)
    _common.Record("two", ["old"]).add("fast", 8, 4, 0.5, seconds=2.5)
    assert _common.Record("one", ["old"]).get("fast", 8, 4, 0.5, "seconds") == 1.5
    assert _common.Record("one", ["new"]).get("fast", 8, 4, 0.5, "seconds") is None
    assert _common.Record("one", ["old"], resume=False).get("fast", 8, 4, 0.5, "seconds") is None
    _common.Record("one", ["new"]).add("fast", 8, 4, 0.5, seconds=3.5)
    assert [row["value"] for row in csv.DictReader(_common.RESULTS.open())] == ["2.5", "3.5"]


def test_a_verdict_begins_with_its_outcome(capsys):
    _common.verdict("slope", 1.0, 1.1, at_least=False)
    _common.verdict("slope", 1.0, 1.1, at_least=True)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["met", "MISSED"]
