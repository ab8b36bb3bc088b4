"""Pages and page pieces generated from the ledger: badges, the ledger table."""

import re
from pathlib import Path

import jinja2
from ledger import STATUS, Ledger, Record, summary
from markupsafe import Markup, escape

from ditbook.claims import format_number

TEMPLATES = Path(__file__).with_name("templates")


def badge(ledger: Ledger, id: str, prefix: str = "../book/") -> str:
    """The status of a statement as a link to its line in the ledger."""
    status = ledger.status[id]
    return f'<a class="status status-{status}" href="{prefix}ledger.html#claim-{id}">{status}</a>'


def ledger_page(text: str, ledger: Ledger) -> str:
    """The ledger page: summary, what each status means, filters, and one row per statement with its checks."""
    choices = {
        "section": sorted({entry["section"] for entry in ledger.entries}),
        "kind": list(dict.fromkeys(entry["kind"] for entry in ledger.entries)),
        "status": [status for status in STATUS if status in ledger.status.values()],
    }
    generated = _render("ledger.html", ledger=ledger, states=STATUS, choices=choices)
    return replace_placeholder(text, f"**{summary(ledger)}.**\n\n{generated}\n")


def replace_placeholder(text: str, generated: str) -> str:
    """Replace what stands between ``<!-- generated -->`` and ``<!-- end -->``."""
    return re.sub(r"<!-- generated -->.*?<!-- end -->", lambda _: generated, text, flags=re.DOTALL)


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
    return re.sub(r"\n\s*\n+", "\n", environment.get_template(template).render(**values))


# Pages with a placeholder, and the function that fills it.
GENERATED = {"ledger": ledger_page}
