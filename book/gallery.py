"""The figures of the executed notebooks, with the words that travel with them."""

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import nbformat

SOURCE = re.compile(r'src="data:image/svg\+xml;base64,([^"]+)"')


@dataclass(frozen=True)
class Figure:
    """One figure of the book: where it stands, its words, and its SVG text."""

    name: str
    chapter: str
    title: str
    alt: str
    caption: str
    svg: str
    keep_colours: bool


def collect_figures(paths: Iterable[Path]) -> dict[str, Figure]:
    """All figures by name, in reading order; ``title`` is the title of the chapter."""
    return {figure.name: figure for path in paths for figure in _figures(path)}


def _figures(path: Path) -> Iterable[Figure]:
    notebook = nbformat.read(path, as_version=4)
    title = chapter_title(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            record = output.get("metadata", {}).get("ditbook_figure")
            if record is not None:
                markup = output["data"]["text/html"]
                picture = base64.b64decode(SOURCE.search(markup)[1]).decode()
                words = record["name"], path.stem, title, record["alt"], record["caption"]
                yield Figure(*words, picture, "keep-colours" in markup)


def chapter_title(notebook) -> str:
    """The first heading of a notebook."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.search(r"^# (.+)$", text, flags=re.MULTILINE)[1]
