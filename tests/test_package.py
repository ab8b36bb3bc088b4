"""The package as a whole: sources that resolve, a test file and a page for each module, short functions."""

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
NUMBERS = {entry["number"] for entry in yaml.safe_load((ROOT / "book" / "statements.yml").read_text())}
MODULES = sorted(path for path in (ROOT / "ditbook").glob("*.py") if path.stem != "__init__")
LONGEST_FUNCTION = 45


def unknown_sources(text: str) -> list[str]:
    """Statements named in ``Source:`` lines that are not registered."""
    named = [
        name.strip() for line in re.findall(r"^\s*Source: (.+?)\.?$", text, re.MULTILINE) for name in line.split(",")
    ]
    return [name for name in named if name not in NUMBERS]


def long_functions(text: str) -> list[str]:
    """Functions with more lines of code than the bar; the docstring does not count."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) else None
            length = node.end_lineno - node.lineno - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0)
            if length > LONGEST_FUNCTION:
                found.append(f"{node.name}: {length} lines")
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_every_source_is_a_registered_statement(module):
    assert unknown_sources(module.read_text()) == []


def test_an_unregistered_source_is_found():
    assert unknown_sources('"""Doc.\n\n    Source: Lemma 2.1, Lemma 9.9\n    """') == ["Lemma 9.9"]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_every_module_has_a_test_file_and_a_page(module):
    assert (ROOT / "tests" / f"test_{module.stem}.py").exists()
    assert (ROOT / "book" / "api" / f"{module.stem}.md").exists()


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_functions_are_short(module):
    assert long_functions(module.read_text()) == []


def test_a_long_function_is_found():
    assert long_functions("def f():\n" + "    x = 1\n" * 60) == ["f: 60 lines"]
