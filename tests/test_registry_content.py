"""What the registry says of the paper: complete, readable, and consistent in itself."""

import re
from collections import Counter
from pathlib import Path

import yaml

ENTRIES = yaml.safe_load((Path(__file__).parents[1] / "book" / "statements.yml").read_text(encoding="utf-8"))
EVIDENCE = {entry["id"]: entry["evidence"] for entry in ENTRIES}
ERRATA = [entry for entry in ENTRIES if entry["kind"] == "erratum"]


def offenders(entries: list[dict], rule) -> list[str]:
    """The ids of the entries that break the rule."""
    return [entry["id"] for entry in entries if not rule(entry)]


def sentences(text: str) -> int:
    return len(re.findall(r"[.?!](?:\s|$)", text))


def test_errata_and_book_results_are_numbered_without_gaps():
    assert [entry["id"] for entry in ERRATA] == [f"erratum-{n}" for n in range(1, 50)]
    assert [entry["id"] for entry in ENTRIES if entry["kind"] == "book"] == [f"book-{n}" for n in range(1, 7)]


def test_id_kind_and_printed_number_agree():
    assert not offenders(ENTRIES, lambda e: e["number"].replace(" ", "-").lower() == e["id"].lower())
    assert offenders(ENTRIES, lambda e: e["id"].startswith(e["kind"] + "-")) == ["appendix-A"]


def test_plain_words_are_one_to_three_short_sentences():
    assert not offenders(ENTRIES, lambda e: 40 <= len(e["plain"].strip()) <= 420)
    assert not offenders(ENTRIES, lambda e: e["plain"].strip().endswith(".") and sentences(e["plain"]) <= 3)


def test_no_two_statements_share_their_plain_words():
    assert max(Counter(entry["plain"] for entry in ENTRIES).values()) == 1


def test_inline_formulas_are_closed():
    texts = ("title", "where", "printed", "holds", "consequence", "plain")
    assert not offenders(ENTRIES, lambda e: all(e.get(field, "").count("$") % 2 == 0 for field in texts))


def test_readings_and_only_readings_point_at_statements_that_are_checked():
    assert not offenders(ENTRIES, lambda e: bool(e.get("see")) == (e["evidence"] == "reading"))
    assert not offenders(
        ENTRIES, lambda e: all(EVIDENCE[target] not in ("reading", "assumed") for target in e.get("see", []))
    )


def test_an_erratum_says_where_what_and_what_follows():
    fields = ("where", "printed", "holds", "consequence", "rests_on")
    assert not offenders(ERRATA, lambda e: all(e.get(field) for field in fields))
    assert not offenders(ERRATA, lambda e: e["basis"] in ("seen", "derived", "text"))
