"""The claims map: every registered statement as a mark, in bands by section, with what it rests on as lines.

The drawing is a static SVG made at build time; colours come from the style sheet, so it follows the theme.
"""

from collections import defaultdict
from dataclasses import dataclass

import networkx as nx
from ledger import Ledger

# Bands from top to bottom, so that most lines run downwards; sections that are not named here come last.
BANDS = {
    "Diffusion": ("2.1", "D.1"),
    "Score decomposition": ("2.2",),
    "The score network": ("2.3", "3.1"),
    "Universality by construction": ("E", "E.1", "E.2", "E.3", "E.5"),
    "Score approximation": ("3.2", "F.1"),
    "Covering numbers": ("F.2",),
    "Score and distribution estimation": ("3.3", "F.3"),
    "Tools": ("D.2", "D.3"),
    "Almost-linear gradient": ("4.1", "G"),
    "Efficiency threshold and hardness": ("4.2",),
    "Practice": ("5", "A"),
}
WIDTH, COLUMN, ROW, HEADING, MARGIN = 760, 68, 58, 34, 12
SHORT = {
    "Definition": "Def", "Assumption": "Ass", "Lemma": "Lem", "Theorem": "Thm", "Proposition": "Prop",
    "Corollary": "Cor", "Remark": "Rem", "Equation": "Eq", "Figure": "Fig", "Problem": "Prob", "Hypothesis": "Hyp",
    "Observation": "Obs", "Section": "Sec", "Appendix": "App", "Erratum": "Err",
}  # fmt: skip
# The mark of each status, around (0, 0): colour is never the only difference.
MARKS = {
    "verified": '<circle r="8"/>',
    "bound": '<path d="M-9-5H9V5H-9Z"/>',
    "rate": '<path d="M0-9L9 7H-9Z"/>',
    "corrected": '<path d="M0-9L9 0L0 9L-9 0Z"/>',
    "not-borne-out": '<path class="hollow" d="M0-9L9 0L0 9L-9 0Z"/>',
    "reading": '<circle class="hollow" r="7"/>',
    "assumed": '<path class="hollow" d="M-7-7H7V7H-7ZM-7-7L7 7M7-7L-7 7"/>',
    "failed": '<path class="cross" d="M-8-8L8 8M8-8L-8 8"/>',
    "open": '<circle class="dashed" r="7"/>',
}


@dataclass(frozen=True)
class Node:
    """One statement on the map; ``x`` and ``y`` are the centre of its mark."""

    id: str
    label: str
    x: float
    y: float


def dependency_graph(ledger: Ledger) -> nx.DiGraph:
    """Edges from a statement to those that rest on it."""
    graph = nx.DiGraph()
    graph.add_nodes_from(entry["id"] for entry in ledger.entries)
    graph.add_edges_from((below, entry["id"]) for entry in ledger.entries for below in entry["rests_on"])
    return graph


def bands(ledger: Ledger) -> dict[str, list[str]]:
    """The statements of each band: those with few ancestors first, errata after the statements they mend."""
    depth = {id: d for d, level in enumerate(nx.topological_generations(dependency_graph(ledger))) for id in level}
    band_of = {section: name for name, sections in BANDS.items() for section in sections}
    groups: dict[str, list[dict]] = defaultdict(list)
    for entry in ledger.entries:
        groups[band_of.get(entry["section"], f"Section {entry['section']}")].append(entry)
    order = sorted(groups, key=lambda name: list(BANDS).index(name) if name in BANDS else len(BANDS))
    return {
        name: [e["id"] for e in sorted(groups[name], key=lambda e: (e["kind"] == "erratum", depth[e["id"]]))]
        for name in order
    }


def place(ledger: Ledger) -> tuple[list[Node], list[tuple[str, float]], float]:
    """Nodes in rows, the headings of the bands with their heights, and the height of the drawing."""
    nodes, headings, y = [], [], float(MARGIN)
    for name, ids in bands(ledger).items():
        headings.append((name, y + 18))
        y += HEADING
        columns = (WIDTH - 2 * MARGIN) // COLUMN
        for index, id in enumerate(ids):
            row, column = divmod(index, columns)
            nodes.append(
                Node(id, short_label(ledger.entry(id)["number"]), MARGIN + COLUMN * (column + 0.5), y + ROW * row + 14)
            )
        y += ROW * (1 + (len(ids) - 1) // columns)
    return nodes, headings, y + MARGIN


def short_label(number: str) -> str:
    """``Lemma E.4`` as ``Lem E.4``, so that it fits under its mark."""
    kind, _, rest = number.partition(" ")
    return f"{SHORT.get(kind, kind)} {rest}".strip()


def edges(ledger: Ledger, nodes: list[Node]) -> list[tuple[str, str, str]]:
    """Source, target and path of each line; lines implied by others are left out, what can be reached stays."""
    at = {node.id: node for node in nodes}
    reduced = nx.transitive_reduction(dependency_graph(ledger))
    return [(a, b, _path(at[a], at[b])) for a, b in sorted(reduced.edges)]


def _path(a: Node, b: Node) -> str:
    if abs(a.y - b.y) < 1:  # neighbours in one row: an arch above it
        lift = 16 + abs(a.x - b.x) / 12
        return f"M{a.x:g} {a.y - 8:g}Q{(a.x + b.x) / 2:g} {a.y - 8 - lift:g} {b.x:g} {b.y - 8:g}"
    side = 10 if b.y > a.y else -10
    bend = (b.y - a.y) * 0.45
    return f"M{a.x:g} {a.y + side:g}C{a.x:g} {a.y + bend:g} {b.x:g} {b.y - bend:g} {b.x:g} {b.y - side:g}"
