"""Stage the book: executed notebooks, prose and generated pages side by side, ready for Sphinx.

Badges and plain-words readings enter here, from the registry and the runs; nothing of it is typed.
"""

import re
import shutil
from pathlib import Path

import nbformat
import yaml
from execute import ROOT, BuildError, chapters, toc_files
from ledger import Ledger
from pages import badge, fill, read_book

BOX = re.compile(r"^(:{3,}\{admonition\}[^\n]*\n(?::[^\n]*\n)*?:name: (?P<id>[\w.-]+)\n(?::[^\n]*\n)*)", re.MULTILINE)


def stage(ledger: Ledger, executed: dict[str, Path], commit: str, root: Path = ROOT) -> Path:
    """Write the staged book below ``_build/stage`` and return that folder."""
    target = root / "_build" / "stage"
    shutil.rmtree(target, ignore_errors=True)
    (target / "notebooks").mkdir(parents=True)
    config = configure(yaml.safe_load((root / "_config.yml").read_text()))
    (target / "_config.yml").write_text(yaml.safe_dump(config))
    shutil.copy(root / "_toc.yml", target)
    shutil.copytree(root / "book", target / "book", ignore=shutil.ignore_patterns("__pycache__", "templates"))
    names = chapters(root)
    for name in names:
        notebook = nbformat.read(executed[name], as_version=4)
        nbformat.write(decorate(notebook, ledger, names), target / "notebooks" / f"{name}.ipynb")
    book = read_book(ledger, executed.values(), commit, target / "book")
    (target / "book" / "_static" / "figures").mkdir()
    for figure in book.figures.values():
        (target / "book" / "_static" / "figures" / f"{figure.name}.svg").write_text(figure.svg)
    for page in (target / "book").rglob("*.md"):
        page.write_text(link_notebooks(fill(page.stem, page.read_text(), book), names))
    _require_pages(target, root)
    return target


def configure(config: dict) -> dict:
    """The staged configuration: nothing is executed; buttons that lead to a repository only if its address is given."""
    config = config | {"execute": {"execute_notebooks": "off"}}
    if config.get("repository", {}).get("url"):
        config["html"] |= {"use_repository_button": True, "use_issues_button": True}
        config["launch_buttons"] = {"notebook_interface": "jupyterlab", "binderhub_url": "https://mybinder.org"}
    return config


def decorate(notebook, ledger: Ledger, names: list[str]):
    """Put the status badge and the plain-words reading into every box that names a registered statement."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = link_notebooks(BOX.sub(lambda match: _with_badge(match, ledger), cell.source), names)
    return notebook


def link_notebooks(text: str, names: list[str]) -> str:
    """Point links at the executed notebooks: the sources say ``NAME.md``, the staged book holds ``NAME.ipynb``."""
    return re.sub(rf"(\]\([^)\s]*\b(?:{'|'.join(map(re.escape, names))}))\.md\b", r"\1.ipynb", text)


def _with_badge(match: re.Match, ledger: Ledger) -> str:
    id = match["id"]
    if id not in ledger.status:
        return match[0]
    plain = ledger.entry(id)["plain"].strip()
    return f'{match[0]}\n<p class="box-status">{badge(ledger, id)}</p>\n\n**In plain words.** {plain}\n'


def _require_pages(target: Path, root: Path) -> None:
    found = {path.relative_to(target).with_suffix("").as_posix() for path in target.rglob("*")}
    missing = [page for page in toc_files(root) if page not in found]
    if missing:
        raise BuildError(f"_toc.yml names pages that do not exist: {', '.join(missing)}")
