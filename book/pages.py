"""Pages and page pieces generated from registry and runs: badges, ledger, map, errata, headlines, gallery, runs."""

import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import claims_map
import explorer
import jinja2
import nbformat
import yaml
from gallery import Figure, chapter_title, collect_figures
from ledger import STATUS, Ledger, LedgerError, Record, summary
from markupsafe import Markup, escape

from ditbook.claims import format_number

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Book:
    """Everything a generated page is made of: the ledger, the figures by name, the run of every chapter."""

    ledger: Ledger
    figures: dict[str, Figure]
    runs: list[dict]
    commit: str
    folder: Path


def read_book(ledger: Ledger, executed: Iterable[Path], commit: str, folder: Path) -> Book:
    """Gather what the executed notebooks hold; ``folder`` is the staged ``book`` folder with its data files."""
    executed = list(executed)
    return Book(ledger, collect_figures(executed), [_run(path, ledger) for path in executed], commit, folder)


def _run(path: Path, ledger: Ledger) -> dict:
    notebook = nbformat.read(path, as_version=4)
    run = notebook.metadata.get("ditbook", {})
    checks = sum(record.chapter == path.stem for records in ledger.records.values() for record in records)
    parameters = {"scale": run["parameters"]["scale"], "seed": run["parameters"].get("seed", 0)}
    return dict(run) | parameters | {"chapter": path.stem, "title": chapter_title(notebook), "checks": checks}


def badge(ledger: Ledger, id: str, prefix: str = "../book/") -> str:
    """The status of a statement as a link to its line in the ledger."""
    status = ledger.status[id]
    return f'<a class="status status-{status}" href="{prefix}ledger.html#claim-{id}">{status}</a>'


def ledger_page(book: Book) -> str:
    """Summary, what each status means, filters, and one row per statement with its checks."""
    ledger = book.ledger
    choices = {
        "section": sorted({entry["section"] for entry in ledger.entries}),
        "kind": list(dict.fromkeys(entry["kind"] for entry in ledger.entries)),
        "status": [status for status in STATUS if status in ledger.status.values()],
    }
    generated = _render("ledger.html", ledger=ledger, states=STATUS, choices=choices)
    return f"**{summary(ledger)}.**\n\n{generated}\n"


def map_page(book: Book) -> str:
    """All statements as marks, what they rest on as lines, and the same as a table."""
    ledger = book.ledger
    nodes, headings, height = claims_map.place(ledger)
    return _render(
        "map.html",
        ledger=ledger,
        nodes=nodes,
        headings=headings,
        height=height,
        width=claims_map.WIDTH,
        edges=claims_map.edges(ledger, nodes),
        bands=claims_map.bands(ledger),
        marks=claims_map.MARKS,
        states=STATUS,
        shown=[status for status in STATUS if status in ledger.status.values()],
        target=lambda entry: place_of(entry, ledger),
    )


# The errata by subject, as a reader would look for them.
ERRATA_GROUPS = {
    "Normalisation, axes and the efficient criteria": (1, 2, 3, 4, 29, 31, 32, 33, 22, 23, 34, 35, 36, 37),
    "Universality": (5, 6, 7, 8, 9, 12, 11, 24, 25, 38, 39, 40, 41, 42),
    "Statistical rates": (10, 13, 14, 15, 16, 17, 18, 19, 20, 21, 26, 27, 28, 30, 43, 44, 45, 46, 47, 48, 49),
}


def errata_page(book: Book) -> str:
    """Every erratum with what is printed, what holds, the consequence, and its witnesses."""
    ledger = book.ledger
    errata = {entry["id"]: entry for entry in ledger.entries if entry["kind"] == "erratum"}
    groups = {name: [errata.pop(f"erratum-{n}") for n in numbers] for name, numbers in ERRATA_GROUPS.items()}
    if errata:
        raise LedgerError(f"errata without a group on the errata page: {', '.join(errata)}")
    return _render(
        "errata.html",
        ledger=ledger,
        groups=groups,
        target=lambda entry: place_of(entry, ledger),
        check_link=lambda record: check_link(record, ledger),
    )


def check_link(record: Record, ledger: Ledger) -> str:
    """The card of one check; the first of a chapter has the bare anchor, the others are numbered (see site_html)."""
    here = [other for other in ledger.records[record.claim.id] if other.chapter == record.chapter]
    number = here.index(record) + 1
    suffix = f"-{number}" if number > 1 else ""
    return f"../notebooks/{record.chapter}.html#check-{record.claim.id}{suffix}"


def place_of(entry: dict, ledger: Ledger) -> str:
    """Where to read about a statement: its first check, or its line in the ledger."""
    if ledger.records.get(entry["id"]) and entry["chapter"] in ledger.chapters:
        return f"../notebooks/{entry['chapter']}.html#check-{entry['id']}"
    return f"ledger.html#claim-{entry['id']}"


def headlines(book: Book) -> str:
    """The six results as cards: a sentence, a figure, a measured number, a link."""
    cards = yaml.safe_load((book.folder / "headlines.yml").read_text())
    return _render("cards.html", cards=[_card(card, book) for card in cards])


def _card(card: dict, book: Book) -> dict:
    entry = book.ledger.entry(card["id"])
    figure = book.figures.get(card["figure"])
    if entry["chapter"] in book.ledger.chapters and figure is None:
        raise LedgerError(f"headlines.yml: {card['id']} shows figure {card['figure']!r}, which no chapter draws")
    titles = {run["chapter"]: run["title"] for run in book.runs}
    return {
        "id": card["id"],
        "number": entry["number"],
        "badge": Markup(badge(book.ledger, card["id"])),
        "sentence": card["sentence"],
        "figure": figure,
        "record": find_record(book.ledger, card["id"], card["check"]) if figure else None,
        "link": f"../notebooks/{entry['chapter']}.html" if figure else f"ledger.html#claim-{card['id']}",
        "chapter_title": titles.get(entry["chapter"], "not in the book yet"),
    }


def find_record(ledger: Ledger, id: str, what: str) -> Record:
    """The one check of a statement whose description begins with ``what``.

    :raises LedgerError: none or several do.
    """
    found = [record for record in ledger.records.get(id, []) if record.claim.what.startswith(what)]
    if len(found) != 1:
        raise LedgerError(f"{len(found)} checks of {id} begin with {what!r}, expected one")
    return found[0]


def gallery_page(book: Book) -> str:
    """All figures, small, by chapter, each a link to its place."""
    by_chapter = groupby(book.figures.values(), key=lambda figure: figure.title)
    return _render("gallery.html", chapters={title: list(figures) for title, figures in by_chapter})


def runs_page(book: Book) -> str:
    """Time, memory, scale and seed of every chapter's run, the versions, the commit; and runs recorded earlier."""
    with (book.folder / "_static" / "runs.csv").open() as file:
        recorded = list(csv.DictReader(file))
    titles = {run["chapter"]: run["title"] for run in book.runs}
    return _render(
        "runs.html",
        runs=book.runs,
        commit=book.commit,
        versions=book.runs[0]["versions"],
        platforms=sorted({run["platform"] for run in book.runs}),
        titles=titles,
        full=[row for name in titles for row in recorded if (row["kind"], row["name"]) == ("full", name)],
        benchmarks=[row for row in recorded if row["kind"] == "bench"],
    )


def explorer_page(book: Book) -> str:
    """Sliders over tables, and the tables."""
    tables = explorer.tables()

    def slider(table: str, name: str, label: str, start: int) -> Markup:
        last = len(tables[table]["stops"][name]) - 1
        field = Markup(
            '<label>{} <input type="range" name="{}" min="0" max="{}" step="1" value="{}"><output></output></label>'
        )
        return field.format(label, name, last, start)

    return _render(
        "explorer.html",
        tables=tables,
        slider=slider,
        degree=explorer.degree,
        logits=(0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
        tolerances=explorer.TOLERANCES,
        token_sizes=explorer.TOKEN_SIZES,
        few_cells=(2, 4, 8, 16, 20),
        samples=explorer.SAMPLES,
        accuracies=explorer.ACCURACIES,
    )


def fill(name: str, text: str, book: Book) -> str:
    """A page with its generated part and its quoted numbers filled in; other pages come back as they are."""
    if name in GENERATED and GENERATION.search(text):
        generated = GENERATED[name](book)
        text = GENERATION.sub(lambda _: generated, text)
    return QUOTATION.sub(lambda match: _quoted(match, book.ledger), text)


# What `make book` replaces: a generated part, and a number quoted from a check, which a plain build leaves as words.
GENERATION = re.compile(r"<!-- generated -->.*?<!-- end -->", re.DOTALL)
QUOTATION = re.compile(r"<!-- number: (?P<id>[\w.-]+) \| (?P<what>.*?) -->.*?<!-- end -->", re.DOTALL)


def _quoted(match: re.Match, ledger: Ledger) -> str:
    record = find_record(ledger, match["id"], match["what"])
    return f'<a href="{check_link(record, ledger)}">{value_of(record)}</a>'


def mathjax(text: str) -> Markup:
    """Registry text as HTML; ``$...$`` becomes the inline mathematics that MathJax looks for."""
    pieces = [escape(piece) for piece in text.strip().split("$")]
    opening, closing = Markup(r'<span class="math notranslate nohighlight">\('), Markup(r"\)</span>")
    return Markup("").join(opening + piece + closing if n % 2 else piece for n, piece in enumerate(pieces))


def describe(record: Record) -> str:
    """What was claimed of a number: its range, its interval, the paper's value."""
    claim = record.claim
    parts = [claim.condition]
    if claim.interval is not None:
        parts.append(f"95% interval {format_number(claim.interval[0])} to {format_number(claim.interval[1])}")
    if claim.paper is not None:
        parts.append(f"paper {format_number(claim.paper)}")
    return ", ".join(parts)


def value_of(record: Record) -> str:
    """The recorded number as it is printed."""
    return "not finite" if record.claim.value is None else format_number(record.claim.value)


def _render(template: str, **values) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"mathjax": mathjax, "describe": describe, "value": value_of}
    # A blank line would end the HTML block for the Markdown reader.
    text = re.sub(r"\n\s*\n+", "\n", environment.get_template(template).render(**values))
    # Second-level headings are Markdown's, so that the page's own contents list them.
    return re.sub(r"^<h2>(.*)</h2>$", r"\n## \1\n", text, flags=re.MULTILINE)


# Pages with a generated part, and the function that writes it.
GENERATED: dict[str, Callable[[Book], str]] = {
    "errata": errata_page,
    "explorer": explorer_page,
    "gallery": gallery_page,
    "index": headlines,
    "ledger": ledger_page,
    "map": map_page,
    "runs": runs_page,
}
