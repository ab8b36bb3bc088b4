"""The ledger: what is registered, what the runs recorded, and the status that follows.

Reads `book/statements.yml` and the executed notebooks; writes nothing but text handed to the caller.
"""

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import nbformat
import yaml

from ditbook.claims import RECORD_KEY, Claim

KINDS = (
    *("definition", "assumption", "lemma", "theorem", "proposition", "corollary", "remark", "equation", "figure"),
    *("problem", "hypothesis", "step", "observation", "section", "erratum", "book"),
)
EVIDENCE = ("identity", "bound", "construction", "rate", "reduction", "definition", "reading", "assumed")
# Status, and what it tells a reader.
STATUS = {
    "verified": "computed two ways, or built and tested: the numbers agree",
    "bound": "the inequality held on every tested input",
    "rate": "a fitted exponent lies where it was claimed",
    "corrected": "the printed form fails its witness, the corrected form passes",
    "not-borne-out": "the run speaks against it; of an erratum: it did not show, the print stands",
    "reading": "a remark; linked to the run that bears on it",
    "assumed": "an unproved hypothesis; nothing to run",
    "failed": "a number left its range",
    "open": "its chapter is not in the book yet",
}
REQUIRED = ("id", "kind", "number", "title", "section", "chapter", "rests_on", "evidence", "plain")


class LedgerError(Exception):
    """The registry and the runs do not fit together; the message names every place."""


@dataclass(frozen=True)
class Record:
    """One claim record with the run it comes from."""

    claim: Claim
    chapter: str
    cell: int
    run: Mapping


@dataclass(frozen=True)
class Ledger:
    """Registry entries in paper order, records by id, derived status by id, and the chapters in the book.

    ``weakened`` names, for a statement that rests on failed ones, the failed ones.
    """

    entries: list[dict]
    records: dict[str, list[Record]]
    status: dict[str, str]
    weakened: dict[str, list[str]]
    chapters: frozenset[str]

    def entry(self, id: str) -> dict:
        """The registry entry of a statement."""
        return next(entry for entry in self.entries if entry["id"] == id)


def read_registry(path: Path) -> list[dict]:
    """The registered statements, checked for shape, unique ids, resolving and acyclic dependencies.

    :raises LedgerError: names every faulty entry.
    """
    entries = yaml.safe_load(path.read_text())
    problems = [problem for entry in entries for problem in _entry_problems(entry)]
    if problems:
        raise LedgerError(_listed(f"{path.name} has faulty entries", problems))
    count = Counter(entry["id"] for entry in entries)
    problems = [f"duplicate id {id}" for id, times in count.items() if times > 1]
    for entry in entries:
        for name in ("rests_on", "see"):
            for other in entry.get(name, []):
                if other not in count:
                    problems.append(f"{entry['id']}: {name} names {other}, which is not registered")
    if not problems:
        try:
            tuple(TopologicalSorter({e["id"]: e["rests_on"] for e in entries}).static_order())
        except CycleError as cycle:
            problems.append("dependency cycle " + " -> ".join(cycle.args[1]))
    if problems:
        raise LedgerError(_listed(f"{path.name} does not hold together", problems))
    return entries


def _entry_problems(entry: dict) -> Iterator[str]:
    name = entry.get("id", f"an entry without id ({entry.get('title', 'untitled')})")
    missing = [key for key in REQUIRED if entry.get(key) in (None, "")]
    if missing:
        yield f"{name}: {', '.join(missing)} missing"
        return
    if entry["kind"] not in KINDS:
        yield f"{name}: kind {entry['kind']!r} is none of {', '.join(KINDS)}"
    if entry["evidence"] not in EVIDENCE:
        yield f"{name}: evidence {entry['evidence']!r} is none of {', '.join(EVIDENCE)}"
    if entry["evidence"] == "reading" and not entry.get("see"):
        yield f"{name}: a reading needs `see`, the statements whose runs bear on it"
    if entry["kind"] == "erratum":
        missing = [key for key in ("where", "printed", "holds", "consequence", "basis") if not entry.get(key)]
        if missing:
            yield f"{name}: {', '.join(missing)} missing"


def records_of(notebook) -> Iterator[tuple[int, dict]]:
    """Cell number and raw record of every claim in an executed notebook."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            record = output.get("metadata", {}).get(RECORD_KEY)
            if record is not None:
                yield number, record


def collect(paths: Iterable[Path]) -> list[Record]:
    """All claim records of the executed notebooks."""
    records = []
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        run = notebook.metadata.get("ditbook", {})
        records += [Record(Claim(**raw), path.stem, cell, run) for cell, raw in records_of(notebook)]
    return records


def build(entries: list[dict], records: list[Record], chapters: Iterable[str]) -> Ledger:
    """Join registry and records for the chapters that are in the book.

    :raises LedgerError: a record with an unregistered id, or a statement of a present chapter without evidence there.
    """
    chapters = frozenset(chapters)
    known = {entry["id"] for entry in entries}
    problems = [
        f"{record.chapter}, cell {record.cell}: check of {record.claim.id!r}, which is not registered"
        for record in records
        if record.claim.id not in known
    ]
    grouped: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        grouped[record.claim.id].append(record)
    for entry in entries:
        evidence_here = any(record.chapter == entry["chapter"] for record in grouped[entry["id"]])
        if entry["evidence"] not in ("reading", "assumed") and entry["chapter"] in chapters and not evidence_here:
            problems.append(f"{entry['id']}: chapter {entry['chapter']} is in the book but has no check of it")
    if problems:
        raise LedgerError(_listed("registry and notebooks are out of step", problems))
    status = {entry["id"]: derive(entry, grouped[entry["id"]], chapters) for entry in entries}
    return Ledger(entries, dict(grouped), status, _weakened(entries, status), chapters)


def derive(entry: dict, records: list[Record], chapters: Iterable[str]) -> str:
    """Status of one statement: from the records alone, and from whether its chapter is in the book."""
    if any(not record.claim.passed for record in records):
        return "failed"
    if entry["evidence"] == "assumed":
        return "assumed"
    if entry["chapter"] not in chapters:
        return "open"
    if any(record.claim.refutes for record in records):
        return "not-borne-out"
    if entry["kind"] == "erratum":
        return "corrected"
    return {"bound": "bound", "rate": "rate", "reading": "reading"}.get(entry["evidence"], "verified")


def _weakened(entries: list[dict], status: dict[str, str]) -> dict[str, list[str]]:
    """Statements that rest, directly or not, on a failed one, with the failed ones named."""
    parents = {entry["id"]: entry["rests_on"] for entry in entries}
    below: dict[str, set[str]] = {}
    for id in TopologicalSorter(parents).static_order():
        below[id] = {p for p in parents[id] if status[p] == "failed"}.union(*(below[p] for p in parents[id]))
    return {id: sorted(failed) for id, failed in below.items() if failed}


def summary(ledger: Ledger) -> str:
    """One line: how many statements have which status, and how many checks stand behind them."""
    count = Counter(ledger.status.values())
    parts = [f"{count[status]} {status}" for status in STATUS if count[status]]
    checks = sum(len(records) for records in ledger.records.values())
    return f"{len(ledger.entries)} statements: {', '.join(parts)}; {checks} checks"


def as_csv(ledger: Ledger, commit: str) -> str:
    """All records as CSV, one line per check, with the run's parameters, versions and commit."""
    rows = [
        {"number": ledger.entry(id)["number"], "status": ledger.status[id], **_csv_row(record), "commit": commit}
        for id in ledger.status
        for record in ledger.records.get(id, [])
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(record: Record) -> dict:
    claim, run = asdict(record.claim), record.run
    claim["interval_low"], claim["interval_high"] = claim.pop("interval") or (None, None)
    parameters = {name: run.get("parameters", {}).get(name) for name in ("scale", "seed")}
    place = {"chapter": record.chapter, "cell": record.cell, "platform": run.get("platform")}
    return claim | place | parameters | run.get("versions", {})


def _listed(title: str, problems: list[str]) -> str:
    return title + ":\n" + "\n".join(f"  - {problem}" for problem in problems)
