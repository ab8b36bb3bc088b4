"""Finish the rendered HTML: what Sphinx and its themes leave for us to mend, page by page."""

import re
from collections import Counter
from pathlib import Path

from execute import BuildError

ID = re.compile(r'(?<=\sid=")[^"]+(?=")')


def finish(site: Path, pages: list[str]) -> None:
    """Mend every page of the book in place.

    :raises BuildError: a page of the table of contents was not rendered.
    """
    missing = [page for page in pages if not (site / f"{page}.html").exists()]
    if missing:
        raise BuildError(f"pages without HTML: {', '.join(missing)}")
    for page in pages:
        path = site / f"{page}.html"
        path.write_text(mend(path.read_text()))


def mend(text: str) -> str:
    """One page: anchors on claim cards, no id twice, scrolling by keyboard, no false roles, launch links."""
    text = re.sub(r"<pre(?=>| id=)", '<pre tabindex="0"', text)
    # The children of a citation list carry roles of their own, so the list must not claim to be one.
    text = re.sub(r'(<div[^>]*citation-list[^>]*) role="list"|(<div) role="list"([^>]*citation-list)', r"\1\2\3", text)
    # The repository holds the text notebooks, the staged book their executed copies.
    text = re.sub(r"(lab/tree/notebooks/[\w-]+)\.ipynb", r"\1.md", text)
    return unique_ids(anchor_claims(text))


def anchor_claims(text: str) -> str:
    """Give the n-th card of a claim the id ``check-<id>`` (first) or ``check-<id>-n``."""
    seen: Counter[str] = Counter()

    def with_id(match: re.Match) -> str:
        seen[match[1]] += 1
        suffix = f"-{seen[match[1]]}" if seen[match[1]] > 1 else ""
        return f'{match[0]} id="check-{match[1]}{suffix}"'

    return re.sub(r'<div class="claim [\w-]+" data-claim="([^"]+)"', with_id, text)


def unique_ids(text: str) -> str:
    """Number the second and later use of an id (exercise and solution blocks repeat theirs)."""
    seen: Counter[str] = Counter()

    def numbered(match: re.Match) -> str:
        seen[match[0]] += 1
        return match[0] if seen[match[0]] == 1 else f"{match[0]}-{seen[match[0]]}"

    return ID.sub(numbered, text)
