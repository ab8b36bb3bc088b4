"""The chapters as texts: in step with contents and registry, complete by the chapter contract, without outputs."""

import re
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
import pytest
import yaml
from execute import chapters
from ledger import read_registry, records_of

ROOT = Path(__file__).parents[1]
NAMES = chapters()
LONGEST_CELL = 28
REGISTRY = {entry["id"]: entry for entry in read_registry(ROOT / "book" / "statements.yml")}
CHECK = re.compile(r"""\bcheck\(\s*["']([\w.-]+)["']""")
BOX_NAME = re.compile(r":class: (?:statement|erratum)\n:name: ([\w.-]+)")
FIGURE = re.compile(r"""show\(\s*\w+,\s*["']([a-z0-9-]+)["']""")


def source(name: str) -> str:
    return (ROOT / "notebooks" / f"{name}.md").read_text()


def cells(name: str, kind: str) -> list:
    return [cell for cell in jupytext.read(ROOT / "notebooks" / f"{name}.md").cells if cell.cell_type == kind]


def prose(name: str) -> str:
    return "\n".join(cell.source for cell in cells(name, "markdown"))


def missing_parts(text: str) -> list[str]:
    """Parts of the chapter contract that a chapter's prose lacks."""
    parts = {
        "link to the paper": r"https://arxiv\.org/abs/2407\.01079",
        "reading and running time": r"(?i)reading time",
        "what you will learn": r"(?i)what you will learn",
        "how to run it alone": r"Run this notebook alone",
        "a statement box": r":class: statement",
        "what breaks": r"(?i)\bbreaks?\b|fails?\b",
        "what a finite experiment cannot show": r":class: cannot-show",
        "exercises": r"(?m)^## Exercises",
        "three exercises": r"(?s)(\{exercise\}.*){3}",
        "three solutions": r"(?s)(\{solution(-start)?\}.*){3}",
        "the next step": r"(?m)^## Next",
    }
    return [part for part, pattern in parts.items() if not re.search(pattern, text)]


def test_every_notebook_is_in_the_contents_and_the_other_way_round():
    assert sorted(NAMES) == sorted(path.stem for path in (ROOT / "notebooks").glob("*.md"))


def test_no_notebook_with_outputs_is_kept():
    assert not list((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_is_complete(name):
    assert missing_parts(prose(name)) == []


def test_an_incomplete_chapter_is_found():
    text = prose(NAMES[0])
    assert missing_parts(text.replace(":class: cannot-show", ":class: note")) == [
        "what a finite experiment cannot show"
    ]
    assert missing_parts(text.replace("## Exercises", "## Puzzles")) == ["exercises"]


@pytest.mark.parametrize("name", NAMES)
def test_checks_and_boxes_carry_registered_ids(name):
    used = set(CHECK.findall(source(name))) | set(BOX_NAME.findall(source(name)))
    assert used - set(REGISTRY) == set()


@pytest.mark.parametrize("name", NAMES)
def test_every_registered_statement_of_a_chapter_is_checked_or_linked_there(name):
    text, checked = source(name), set(CHECK.findall(source(name)))
    for id, entry in REGISTRY.items():
        if entry["chapter"] == name and entry["evidence"] not in ("reading", "assumed"):
            # Ids that a loop checks stand in the text as plain strings.
            assert id in checked or f'"{id}"' in text, f"{name} has no check of {id}"


@pytest.mark.parametrize("name", NAMES)
def test_a_box_bears_the_number_of_its_statement(name):
    for title, id in re.findall(r"\{admonition\} (.*)\n:class: (?:statement|erratum)\n:name: ([\w.-]+)", source(name)):
        assert title.startswith(REGISTRY[id]["number"]), f"{title!r} names {id}"


@pytest.mark.parametrize("name", NAMES)
def test_parameters_come_first_and_cells_are_short(name):
    code = cells(name, "code")
    assert "parameters" in code[0].metadata["tags"]
    assert re.match(r'scale = "quick".*\nseed = 0', code[0].source)
    long = [cell.source.splitlines()[0] for cell in code if len(cell.source.splitlines()) > LONGEST_CELL]
    assert long == []


def unfolded_drawings(code: list) -> list[str]:
    """First lines of the cells that draw a figure and show their code at once."""
    drawing = [cell for cell in code if FIGURE.search(cell.source)]
    return [cell.source.splitlines()[0] for cell in drawing if "hide-input" not in cell.metadata.get("tags", [])]


@pytest.mark.parametrize("name", NAMES)
def test_code_that_only_draws_is_folded(name):
    assert unfolded_drawings(cells(name, "code")) == []


def test_a_drawing_that_is_not_folded_is_found():
    code = cells(NAMES[0], "code")
    for cell in code:
        cell.metadata.pop("tags", None)
    assert unfolded_drawings(code) != []


@pytest.mark.parametrize("name", NAMES)
def test_markdown_has_no_backtick_directives(name):
    assert re.findall(r"^```+\{(?!code-cell)\w+", source(name), flags=re.MULTILINE) == []


def typed_decimals(text: str) -> list[str]:
    """Result sentences (those with a number glued from the run) that also hold a decimal typed by hand.

    Formulas, code, link addresses and numbers of statements may hold decimals: they are parameters and names.
    """
    names = r"(?:Section|Equation|Lemma|Definition|Theorem|Corollary|Assumption|Remark|Proposition)s? [\w.]+"
    allowed = rf"\$[^$]*\$|\{{glue:\w+\}}`[^`]*`|`[^`]*`|\]\([^)]*\)|{names}|\([A-H0-9][.\d]*\)"
    sentences = [s for part in re.split(r"\n\s*\n", text) for s in re.split(r"(?<=[.?!])\s+(?=[A-Z])", part)]
    results = [sentence for sentence in sentences if "{glue:" in sentence]
    return [sentence for sentence in results if re.search(r"\d\.\d", re.sub(allowed, "", sentence))]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_in_result_sentences_come_from_the_run(name):
    assert typed_decimals(prose(name)) == []


def test_a_typed_decimal_in_a_result_sentence_is_found():
    glued = "The slope is {glue:text}`slope:.2f`, for $t = 0.5$ as in Lemma 2.1 and (2.4)."
    assert typed_decimals(glued) == []
    assert typed_decimals("At step 0.05 nothing is claimed. " + glued) == []
    assert typed_decimals(glued[:-1] + ", twice 0.37.") != []


def test_sentences_on_the_first_page_hold_no_typed_number():
    cards = yaml.safe_load((ROOT / "book" / "headlines.yml").read_text())
    assert [card["id"] for card in cards if re.search(r"\d", card["sentence"])] == []


FITTED = re.compile(r"(^|: )(fitted )?(exponent|slope|order|rate) (of|in|at)\b")
EXECUTED = ROOT / "_build" / "executed" / "quick"


def without_interval(records: list[dict]) -> list[str]:
    """Fitted exponents that do not say how sure they are (those counted without a fit say so)."""
    fitted = [record for record in records if FITTED.search(record["what"]) and "no fit" not in record["what"]]
    return [record["what"] for record in fitted if record["interval"] is None]


@pytest.mark.parametrize("name", NAMES)
def test_fitted_exponents_carry_an_interval(name):
    if not (EXECUTED / f"{name}.ipynb").exists():
        pytest.skip("not executed; run make book first")
    notebook = nbformat.read(EXECUTED / f"{name}.ipynb", as_version=4)
    assert without_interval([record for _, record in records_of(notebook)]) == []


def test_a_bare_exponent_is_found():
    bare, exact = "(1, 2): exponent of depth in ε", "exponent in L (counted, no fit)"
    records = [{"what": bare, "interval": None}, {"what": exact, "interval": None}, {"what": bare, "interval": [1, 2]}]
    assert without_interval(records) == [bare]


def test_labels_and_figure_names_are_unique_in_the_book():
    labels = Counter(
        label for name in NAMES for label in re.findall(r"^:label: (\S+)", source(name), flags=re.MULTILINE)
    )
    figures = Counter(figure for name in NAMES for figure in FIGURE.findall(source(name)))
    boxes = Counter(box for name in NAMES for box in BOX_NAME.findall(source(name)))
    assert [key for count in (labels, figures, boxes) for key, times in count.items() if times > 1] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_is_a_valid_notebook(name):
    notebook = nbformat.from_dict(jupytext.read(ROOT / "notebooks" / f"{name}.md"))
    nbformat.validate(notebook)
    assert notebook.metadata["kernelspec"]["name"] == "python3"
