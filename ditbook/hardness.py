"""Section 4.2: why the norm threshold is there. A formula goes in, one attention call comes out.

The chain is satisfiability -> orthogonal vectors -> attention. If attention with entries of order
sqrt(log L) could be approximated in time L^(2 - q), so could satisfiability be decided faster than
Hypothesis 1 (SETH) allows. Here attention is exact and quadratic, so the chain decides formulas of up to
some 30 variables, and what an approximation loses can be read off.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ditbook.attention import softmax_attention
from ditbook.inputs import typed

# Each side of the orthogonal-vectors instance has 2^(n/2) rows; past these sizes it is refused, not tried.
MAX_ROWS_LOG2 = 20
MAX_ENTRIES = 2**30

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Formula:
    """A formula in conjunctive normal form: literal ``v`` is variable v, ``-v`` its negation, v = 1 ... variables.

    An empty clause is false, a formula without clauses true.

    :raises ValueError: a negative number of variables, or a literal that names no variable.
    """

    variables: int
    clauses: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        if self.variables < 0:
            raise ValueError(f"variables must be at least 0, got {self.variables}")
        for number, clause in enumerate(self.clauses, 1):
            for literal in clause:
                if not 1 <= abs(literal) <= self.variables:
                    raise ValueError(f"literal {literal} of clause {number} is out of range 1 ... {self.variables}")


@dataclass(frozen=True)
class Decision:
    """What the attention call says about a formula; true in a condition iff satisfiable.

    ``assignment`` lists the literals that are true, ``(1, -2, 3, ...)``. It is None for an unsatisfiable
    formula, and also when the row that the attention points at turns out to have no partner: then the
    attention was not accurate enough, and the answer is wrong or unsupported.
    """

    satisfiable: bool
    assignment: tuple[int, ...] | None
    model_count: int

    def __bool__(self) -> bool:
        return self.satisfiable


def read_dimacs(path: str | os.PathLike) -> Formula:
    """Read a formula in DIMACS form, with the liberties that files in circulation take.

    Comments (``c ...``) may stand anywhere, clauses may share or span lines, spaces do not count, and
    the ``%`` line that closes the SATLIB files ends the formula.

    :raises ValueError: no header, a word that is not an integer, a literal out of range, a last clause
        without its 0, or a number of clauses that differs from the header's; the message says where.
    """
    header, clauses, clause = None, [], []
    with open(path, errors="replace") as file:
        for number, line in enumerate(file, 1):
            words = line.split()
            where = f"{os.fspath(path)}, line {number}"
            if not words or words[0].startswith("c"):
                continue
            if words[0].startswith("%"):
                break
            if words[0] == "p":
                if header is not None:
                    raise ValueError(f"{where}: a second header, {line.strip()!r}")
                header = _header(words, where)
                continue
            if header is None:
                raise ValueError(f"{where}: expected a header 'p cnf VARIABLES CLAUSES' first, got {line.strip()!r}")
            for word in words[: words.index("c")] if "c" in words else words:
                literal = _integer(word, where)
                clause.append(literal)
                if literal == 0:
                    clauses.append(tuple(clause[:-1]))
                    clause = []
    return _formula(os.fspath(path), header, clauses, clause)


def _formula(path: str, header: tuple[int, int] | None, clauses: list, unfinished: list) -> Formula:
    if header is None:
        raise ValueError(f"{path}: expected a header 'p cnf VARIABLES CLAUSES', found none")
    if unfinished:
        raise ValueError(f"{path}: the last clause, {' '.join(map(str, unfinished))}, does not end with 0")
    variables, announced = header
    if len(clauses) != announced:
        raise ValueError(f"{path}: the header announces {announced} clauses, the file has {len(clauses)}")
    try:
        return Formula(variables, tuple(clauses))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _header(words: list[str], where: str) -> tuple[int, int]:
    if len(words) != 4 or words[1] != "cnf":
        raise ValueError(f"{where}: expected the header 'p cnf VARIABLES CLAUSES', got {' '.join(words)!r}")
    variables, clauses = (_integer(word, where) for word in words[2:])
    if variables < 0 or clauses < 0:
        raise ValueError(f"{where}: the header's numbers must be at least 0, got {variables} and {clauses}")
    return variables, clauses


def _integer(word: str, where: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", word):
        raise ValueError(f"{where}: expected an integer, got {word!r}")
    return int(word)


@typed
def falsified(half: Bool[Tensor, "L n"], clauses: Sequence[Sequence[int]], first: int) -> Float[Tensor, "L m"]:
    """1 where a half-assignment makes no literal of the clause true, 0 where it already satisfies it.

    :param half: truth values of the variables first ... first + n - 1, one half-assignment a row.
    """
    n = half.shape[1]
    positive, negative = (torch.zeros(n, len(clauses)) for _ in range(2))
    for column, clause in enumerate(clauses):
        for literal in clause:
            if first <= abs(literal) < first + n:
                (positive if literal > 0 else negative)[abs(literal) - first, column] = 1
    truth = half.to(positive.dtype)
    return ((truth @ positive + (1 - truth) @ negative) == 0).to(positive.dtype)


@typed
def orthogonal_vectors(formula: Formula) -> tuple[Float[Tensor, "L m"], Float[Tensor, "M m"]]:
    """Split and list: two lists of 0/1 vectors, orthogonal pairs being the satisfying assignments.

    Row i of the first list is an assignment of the first half of the variables, row j of the second one
    of the rest, one coordinate a clause: 1 iff that half leaves the clause unsatisfied. Bit v of the
    row number is the value of variable v of the half. A formula of n variables gives
    2^ceil(n/2) and 2^floor(n/2) rows, in torch's default dtype.

    Source: Proposition 4.1

    :raises ValueError: more than 2^20 rows a side, or more than 2^30 entries; nothing is allocated.
    """
    upper = (formula.variables + 1) // 2
    if upper > MAX_ROWS_LOG2:
        raise ValueError(
            f"a formula of {formula.variables} variables needs 2^{upper} rows a side, more than 2^{MAX_ROWS_LOG2}"
        )
    entries = 2**upper * len(formula.clauses)
    if entries > MAX_ENTRIES:
        raise ValueError(f"2^{upper} rows a side of {len(formula.clauses)} clauses are {entries:,} entries, too many")
    first, second = (half_assignments(n) for n in (upper, formula.variables - upper))
    return falsified(first, formula.clauses, 1), falsified(second, formula.clauses, upper + 1)


@typed
def half_assignments(n: int) -> Bool[Tensor, "L n"]:
    """All 2^n rows of truth values, bit v of the row number in column v."""
    return (torch.arange(2**n)[:, None] >> torch.arange(n)) % 2 == 1


def sharpness(L: int) -> float:
    """beta = 2 log L: then L keys that are not orthogonal weigh at most 1/L together.

    Source: Book 1
    """
    return 2 * math.log(L)


@typed
def attention_instance(
    a: Float[Tensor, "L m"], b: Float[Tensor, "M m"], beta: float | int, scale: float | int = 1.0
) -> tuple[Float[Tensor, "L m_"], Float[Tensor, "N m_"], Float[Tensor, "N m_"]]:
    """Queries, keys and values whose logits, after ``scale``, are -beta <a_i, b_j>, and 0 on one extra key.

    Only the extra key, the last one, has a value, 1 in column 0. So the output at i, in column 0, is
    1 / (1 + sum_j exp(-beta <a_i, b_j>)). Values are as wide as keys because torch's fused kernel, which holds no
    L x L array, asks for it. Entries are at most sqrt(beta / scale). Without clauses a coordinate of zeros stands in.

    Source: Book 1
    """
    if a.shape[1] == 0:
        a, b = (torch.nn.functional.pad(x, (0, 1)) for x in (a, b))
    entry = math.sqrt(beta / scale)
    keys = torch.cat([-entry * b, b.new_zeros(1, b.shape[1])])
    values = torch.zeros_like(keys)
    values[-1, 0] = 1
    return entry * a, keys, values


@typed
def partners(o: Float[Tensor, "L"], L: int) -> Int[Tensor, "L"]:
    """The number m of orthogonal partners read off each output o = 1 / (1 + m + r), 0 <= r <= 1/L.

    Outputs with m partners lie in [1/(m + 1 + 1/L), 1/(m + 1)]; the cuts are halfway between these intervals.

    Source: Book 1
    """
    m = torch.arange(L, dtype=o.dtype, device=o.device)
    cuts = (1 / (m + 1 + 1 / L) + 1 / (m + 2)) / 2
    return torch.bucketize(-o, -cuts)


@typed
def satisfiable(formula: Formula, attention: Attention = softmax_attention) -> Decision:
    """Decide a formula, count its models and find one, with a single call of ``attention(q, k, v, scale=1.0)``.

    The call is in float64, with 2^ceil(n/2) queries and one coordinate a clause. An ``attention`` of
    error less than (L - 1)/(4(L + 1)) still decides; the exact count needs more, see book-1.

    Source: Proposition 4.1, Book 1

    :param attention: called as ``attention(q, k, v, scale=1.0)`` with q (L, m), k (M + 1, m), v (M + 1, m).
    :raises ValueError: an instance too large (see ``orthogonal_vectors``), or an output of the attention
        that is not finite or not of shape (L, m).
    """
    a, b = (x.double() for x in orthogonal_vectors(formula))
    L = max(len(a), len(b), 2)
    q, k, v = attention_instance(a, b, sharpness(L))
    o = _output(attention, q, k, v, scale=1.0)
    counts = partners(o, L)
    model_count = int(counts.sum())
    assignment = _assignment(a, b, int(o.argmin()), formula.variables) if model_count else None
    return Decision(model_count > 0, assignment, model_count)


def _output(attention: Attention, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    o = attention(q, k, v, scale=scale)
    shape = (len(q), v.shape[1])
    if o.shape != shape:
        raise ValueError(f"attention must return shape {shape}, got {tuple(o.shape)}")
    if not o.isfinite().all():
        raise ValueError(f"attention must return finite numbers, got {int((~o.isfinite()).sum())} that are not")
    return o[:, 0]


def _assignment(a: Tensor, b: Tensor, i: int, variables: int) -> tuple[int, ...] | None:
    """Row i of the first list with its first partner, as literals; None if it has no partner."""
    orthogonal = (b @ a[i] == 0).nonzero()
    if len(orthogonal) == 0:
        return None
    bits = i + len(a) * int(orthogonal[0])
    return tuple(v if bits >> (v - 1) & 1 else -v for v in range(1, variables + 1))


@typed
def lobatto_nodes(degree: int, bound: float | int) -> Float[Tensor, "nodes"]:
    """The Chebyshev-Lobatto nodes of [exp(-bound^2), 1], float64, from 1 downwards.

    Source: Book 3
    """
    low = math.exp(-(bound**2))
    return (1 + low) / 2 + (1 - low) / 2 * torch.cos(math.pi * torch.arange(degree + 1, dtype=torch.float64) / degree)


def weights_at_zero(nodes: Sequence) -> list:
    """Weights w with p(0) = sum_k w_k p(x_k) for every polynomial p of degree below the number of nodes.

    Works on floats, fractions and multiple-precision numbers alike.

    Source: Book 3
    """
    return [math.prod(y / (y - x) for l, y in enumerate(nodes) if l != k) for k, x in enumerate(nodes)]


@typed
def small_norm_partners(
    a: Float[Tensor, "L m"],
    b: Float[Tensor, "M m"],
    bound: float | int,
    attention: Attention = softmax_attention,
    scale: float | int = 1.0,
) -> Float[Tensor, "L"]:
    """Estimates of the number of orthogonal partners of each a_i, from attention with entries at most ``bound``.

    p_i(x) = sum_j x^<a_i, b_j> has p_i(0) = m_i and degree at most the largest row weight D. Attention with
    logits log(x) <a_i, b_j> gives p_i(x) = 1/o_i - 1; D + 1 calls at nodes x in [exp(-bound^2), 1] are
    extrapolated to 0. Rounding the estimates gives the counts while coth(bound^2/4)^D times the
    relative error of 1/o times L stays below 1/2. float64.

    Source: Book 3

    :param bound: largest entry of queries and keys where ``scale`` is 1; with another scale the entries
        are at most bound / sqrt(scale), so 1/d inside the exponential costs a factor sqrt(d).
    :raises ValueError: bound or scale not positive.
    """
    if not bound > 0 or not scale > 0:
        raise ValueError(f"bound and scale must be positive, got {bound} and {scale}")
    a, b = a.double(), b.double()
    nodes = lobatto_nodes(row_weight(a, b), bound)
    estimate = a.new_zeros(len(a))
    for x, weight in zip(nodes.tolist(), weights_at_zero(nodes.tolist()), strict=True):
        q, k, v = attention_instance(a, b, -math.log(x), scale)
        estimate += weight * (1 / _output(attention, q, k, v, scale) - 1)
    return estimate


@typed
def row_weight(a: Float[Tensor, "L m"], b: Float[Tensor, "M m"]) -> int:
    """The largest number of ones that an a_i and a b_j can share, at least 1: the degree of p_i.

    Source: Book 3
    """
    return max(1, min(int(x.sum(dim=1).max()) for x in (a, b)))


def random_formula(variables: int, clauses: int, generator: torch.Generator, width: int = 3) -> Formula:
    """Clauses of ``width`` different variables each, drawn independently, with random signs.

    Around 4.27 clauses a variable (width 3) the formulas turn from mostly satisfiable to mostly not.
    """
    if not 1 <= width <= variables:
        raise ValueError(f"width must be between 1 and the number of variables, {variables}, got {width}")
    chosen = torch.rand(clauses, variables, generator=generator).argsort(dim=1)[:, :width] + 1
    signs = 2 * torch.randint(2, (clauses, width), generator=generator) - 1
    return Formula(variables, tuple(map(tuple, (signs * chosen).tolist())))


def pigeonhole(pigeons: int, holes: int) -> Formula:
    """Every pigeon has a hole and no two share one: unsatisfiable when there are more pigeons than holes.

    With as many pigeons as holes there are ``holes!`` models.
    """
    seat = [[pigeon * holes + hole + 1 for hole in range(holes)] for pigeon in range(pigeons)]
    pairs = [(-x[h], -y[h]) for h in range(holes) for x, y in combinations(seat, 2)]
    return Formula(pigeons * holes, (*map(tuple, seat), *pairs))


def parity(rungs: int, odd: bool) -> Formula:
    """Parities on the Moebius ladder: a variable an edge, 3 ``rungs`` in all, and an even number true at each vertex.

    With ``odd``, one vertex asks for an odd number: unsatisfiable, since every edge has two ends.
    Without, there are 2^(rungs + 1) models. Needs rungs >= 2.
    """
    if rungs < 2:
        raise ValueError(f"rungs must be at least 2, got {rungs}")
    ends, clauses = 2 * rungs, []
    for vertex in range(ends):
        edges = (vertex + 1, (vertex - 1) % ends + 1, ends + vertex % rungs + 1)
        wrong = 0 if odd and vertex == 0 else 1
        # The clause of signs s excludes the one pattern in which every s_e is contradicted.
        clauses += [
            tuple(s * e for s, e in zip(signs, edges, strict=True))
            for signs in product((1, -1), repeat=3)
            if signs.count(-1) % 2 == wrong
        ]
    return Formula(3 * rungs, tuple(clauses))
