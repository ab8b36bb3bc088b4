"""One look for all figures, reproducible SVG, and captions, alt text and data that travel with the picture."""

import base64
import csv
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import seaborn

# Okabe and Ito's palette (without yellow, which vanishes on white), safe for the common kinds of colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# The paper's bound or exponent beside the measured one.
REFERENCE = {"color": "#707070", "linestyle": "--", "linewidth": 1.2, "zorder": 1}
# Two widths in inches: 4.8 keeps ten-point text readable on a 390-pixel screen, 7 is for rows of panels.
NARROW, WIDE = 4.8, 7.0

MAX_ROWS_SHOWN = 40


def style() -> None:
    """Set matplotlib's defaults for the book: palette, markers, grid, and SVG bytes that repeat."""
    seaborn.set_theme(context="paper", style="ticks", palette=PALETTE)
    matplotlib.rcParams.update(
        {
            "figure.figsize": (NARROW, 3.2),
            "figure.constrained_layout.use": True,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "axes.prop_cycle": matplotlib.cycler(color=PALETTE, marker=MARKERS),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 10,
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "image.cmap": "cividis",
            "legend.frameon": False,
            "legend.fontsize": 9,
            "lines.markersize": 4.5,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "svg.hashsalt": "ditbook",
            "svg.fonttype": "path",
            # Inline figures are shown by `show`, never by the backend's own hook.
            "figure.max_open_warning": 0,
        }
    )


def svg(figure) -> str:
    """The figure as SVG text: no date, identifiers from a fixed salt, so equal figures give equal bytes."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)


def show(
    figure,
    name: str,
    *,
    caption: str,
    alt: str,
    data: Mapping[str, Sequence[Any]] | None = None,
    keep_colours: bool = False,
    measured_time: bool = False,
) -> None:
    """Display a figure with its caption, its alternative text and the numbers behind it, then close it.

    :param name: permanent name, e.g. ``"score-gap"``: lower case, digits, hyphens; the link target is ``fig-<name>``.
    :param caption: one or two sentences: what is drawn, what the reader should see. HTML text, plain Unicode symbols.
    :param alt: what the picture shows, for a reader who cannot see it: axes, curves, finding. 20 characters or more.
    :param data: columns of the table behind the figure (equal lengths); None only for pictures such as photographs.
    :param keep_colours: keep the colours in the dark theme (photographs); other figures are inverted there.
    :param measured_time: True when the figure draws measured seconds, which do not repeat from run to run.
    :raises ValueError: unsuitable name, missing caption, too short alt text, or columns of different lengths.
    """
    import matplotlib.pyplot as plt
    from IPython.display import display

    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"name must be lower-case words joined by hyphens, got {name!r}")
    if not caption.strip():
        raise ValueError(f"figure {name}: caption is empty")
    if len(alt.strip()) < 20:
        raise ValueError(f"figure {name}: alt needs a sentence of at least 20 characters, got {alt!r}")
    table = "" if data is None else _table(name, data)
    picture = svg(figure)
    plt.close(figure)
    encoded = base64.b64encode(picture.encode()).decode()
    kind = "book-figure keep-colours" if keep_colours else "book-figure"
    markup = (
        f'<figure class="{kind}" id="fig-{name}">'
        f'<img alt="{html.escape(alt, quote=True)}" src="data:image/svg+xml;base64,{encoded}">'
        f"<figcaption>{caption}</figcaption>{table}</figure>"
    )
    record = {"name": name, "alt": alt, "caption": caption, "measured_time": measured_time}
    display({"text/html": markup, "text/plain": f"[{name}] {alt}"}, raw=True, metadata={"ditbook_figure": record})


def _table(name: str, data: Mapping[str, Sequence[Any]]) -> str:
    columns = {heading: [_cell(value) for value in values] for heading, values in data.items()}
    lengths = {heading: len(values) for heading, values in columns.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"figure {name}: the columns of data must have one length, got {lengths}")
    rows = list(zip(*columns.values(), strict=True))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([list(columns), *rows])
    link = base64.b64encode(text.getvalue().encode()).decode()
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[:MAX_ROWS_SHOWN]
    )
    more = f"<p>{len(rows) - MAX_ROWS_SHOWN} more rows in the file.</p>" if len(rows) > MAX_ROWS_SHOWN else ""
    return (
        '<details class="figure-data"><summary>Data of this figure</summary>'
        f'<div class="table-scroll" tabindex="0" role="region" aria-label="Data of figure {name}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}"
        f'<p><a download="{name}.csv" href="data:text/csv;base64,{link}">{name}.csv</a></p></details>'
    )


def _cell(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    return f"{value:.6g}" if isinstance(value, float) else str(value)
