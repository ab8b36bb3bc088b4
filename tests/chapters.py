"""Run the part of a chapter that one claim rests on, in this process, perhaps with a piece of ditbook replaced.

A planted fault is worth something only if the chapter's *own* check catches it. Running whole notebooks
for every fault would take an hour, so the cells that the claim's check needs are found by following the
names backwards. Chapters therefore never change an object of another cell in place.
"""

import re
import symtable
from pathlib import Path

import jupytext
import torch

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def run_claim(chapter: str, claim: str, **parameters) -> dict:
    """Execute the cells that the checks of ``claim`` need and return their namespace.

    :param chapter: file name without suffix, e.g. ``"2-2-score-decomposition"``.
    :param parameters: values for names of the cell tagged ``parameters``, e.g. ``scale="quick"``.
    :raises ClaimFailed: when one of the checks does not hold.
    :raises KeyError: when the chapter has no such check, or no such parameter.
    """
    cells = [cell for cell in jupytext.read(NOTEBOOKS / f"{chapter}.md").cells if cell.cell_type == "code"]
    namespace: dict = {"__name__": "__chapter__"}
    dtype = torch.get_default_dtype()  # chapters set it; the next test must not notice
    try:
        for cell in _needed(cells, claim):
            exec(compile(cell.source, f"{chapter}.md", "exec"), namespace)
            if "parameters" in cell.metadata.get("tags", []):
                for name, value in parameters.items():
                    if name not in namespace:
                        raise KeyError(f"{chapter} has no parameter {name}")
                    namespace[name] = value
    finally:
        torch.set_default_dtype(dtype)
    return namespace


def _needed(cells: list, claim: str) -> list:
    pattern = re.compile(rf"""check\(\s*["']{re.escape(claim)}["']""")
    chosen, wanted = [], set()
    for cell in reversed(cells):
        defined, used = _names(cell.source)
        is_target = bool(pattern.search(cell.source))
        is_parameters = bool(chosen) and "parameters" in cell.metadata.get("tags", [])
        if is_target or is_parameters or defined & wanted:
            chosen.append(cell)
            wanted = (wanted - defined) | used
    if not any(pattern.search(cell.source) for cell in chosen):
        raise KeyError(f"no check of {claim} in this chapter")
    return chosen[::-1]


def _names(source: str) -> tuple[set[str], set[str]]:
    """Names that a cell binds at top level, and names that it needs from earlier cells (also inside functions)."""
    top = symtable.symtable(source, "cell", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    read, scopes = set(), [top]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        read |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and (scope is top or s.is_global())}
    # A name that the cell binds itself is taken as its own; cells never update an earlier cell's object in place.
    return bound, read - bound
