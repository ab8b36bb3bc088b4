"""book/ledger.py: status follows from records, and what does not fit together stops the build."""

import csv
import io
from dataclasses import replace

import ledger as book_ledger
import pytest
import yaml
from ledger import LedgerError, Record

from ditbook.claims import Claim

RUN = {"parameters": {"scale": "quick", "seed": 0}, "versions": {"torch": "2.13.0"}, "platform": "Linux"}


def entry(id, **changes):
    complete = {
        "id": id, "kind": "lemma", "number": id.title(), "title": "A title", "section": "2.2", "chapter": "one",
        "rests_on": [], "evidence": "identity", "plain": "What it says, in plain words.",
    }  # fmt: skip
    return complete | changes


def record(id, passed=True, chapter="one", **changes):
    claim = Claim(id, "gap", 1e-12 if passed else 1.0, None, 1e-10, passed)
    return Record(replace(claim, **changes), chapter, 3, RUN)


def registry(tmp_path, *entries):
    path = tmp_path / "statements.yml"
    path.write_text(yaml.safe_dump(list(entries)))
    return book_ledger.read_registry(path)


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        ([entry("a"), entry("a")], "duplicate id a"),
        ([entry("a", rests_on=["ghost"])], "a: rests_on names ghost"),
        ([entry("a", evidence="reading", see=["ghost"])], "a: see names ghost"),
        ([entry("a", rests_on=["b"]), entry("b", rests_on=["a"])], "dependency cycle"),
        ([entry("a", kind="guess")], "a: kind 'guess'"),
        ([entry("a", evidence="hope")], "a: evidence 'hope'"),
        ([entry("a", plain="")], "a: plain missing"),
        ([entry("a", evidence="reading")], "a: a reading needs `see`"),
        ([entry("a", kind="erratum")], "a: where, printed, holds, consequence, basis missing"),
    ],
)
def test_a_registry_that_does_not_hold_together_is_refused(tmp_path, faulty, message):
    with pytest.raises(LedgerError, match=message):
        registry(tmp_path, *faulty)


def test_a_check_of_an_unregistered_statement_stops_the_build():
    with pytest.raises(LedgerError, match="one, cell 3: check of 'lemma-9.9', which is not registered"):
        book_ledger.build([entry("a")], [record("a"), record("lemma-9.9")], ["one"])


def test_a_statement_of_a_present_chapter_without_evidence_stops_the_build():
    with pytest.raises(LedgerError, match="b: chapter one is in the book but has no check of it"):
        book_ledger.build([entry("a"), entry("b")], [record("a")], ["one"])


def test_evidence_in_another_chapter_does_not_replace_the_chapters_own():
    with pytest.raises(LedgerError, match="b: chapter one"):
        book_ledger.build([entry("b")], [record("b", chapter="two")], ["one", "two"])


@pytest.mark.parametrize(
    ("changes", "records", "status"),
    [
        ({}, [record("a")], "verified"),
        ({"evidence": "bound"}, [record("a")], "bound"),
        ({"evidence": "rate"}, [record("a")], "rate"),
        ({"evidence": "reduction"}, [record("a")], "verified"),
        ({"kind": "erratum"}, [record("a")], "corrected"),
        ({"kind": "erratum"}, [record("a"), record("a", refutes=True)], "not-borne-out"),
        ({"evidence": "reading"}, [], "reading"),
        ({"evidence": "assumed"}, [], "assumed"),
        ({}, [record("a"), record("a", passed=False)], "failed"),
        ({"chapter": "later"}, [], "open"),
    ],
)
def test_status_is_derived(changes, records, status):
    assert book_ledger.derive(entry("a", **changes), records, ["one"]) == status


def test_a_failed_statement_weakens_all_that_rests_on_it():
    entries = [entry("a"), entry("b", rests_on=["a"]), entry("c", rests_on=["b"]), entry("d")]
    records = [record("a", passed=False), record("b"), record("c"), record("d")]
    assert book_ledger.build(entries, records, ["one"]).weakened == {"b": ["a"], "c": ["a"]}


def test_the_summary_counts():
    built = book_ledger.build([entry("a"), entry("b", chapter="later")], [record("a"), record("a")], ["one"])
    assert book_ledger.summary(built) == "2 statements: 1 verified, 1 open; 2 checks"


def test_the_csv_has_one_line_per_check_with_range_run_and_commit():
    built = book_ledger.build([entry("a")], [record("a"), record("a", interval=(0.0, 1.0))], ["one"])
    rows = list(csv.DictReader(io.StringIO(book_ledger.as_csv(built, "abc123"))))
    assert len(rows) == 2
    expected = {"id": "a", "status": "verified", "high": "1e-10", "commit": "abc123", "seed": "0", "torch": "2.13.0"}
    assert expected.items() <= rows[0].items()
    assert (rows[1]["interval_low"], rows[1]["interval_high"]) == ("0.0", "1.0")
