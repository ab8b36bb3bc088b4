"""From a formula to one attention call, compared with python-sat, brute force and exact rationals."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pysat.formula import CNF
from pysat.solvers import Cadical153
from torch.utils._python_dispatch import TorchDispatchMode

import ditbook.hardness as hardness
from ditbook.attention import softmax_attention
from ditbook.hardness import (
    Formula,
    attention_instance,
    falsified,
    lobatto_nodes,
    orthogonal_vectors,
    parity,
    partners,
    pigeonhole,
    random_formula,
    read_dimacs,
    row_weight,
    satisfiable,
    sharpness,
    small_norm_partners,
    weights_at_zero,
)

CHAPTER = "4-2-hardness"


def solver_says(formula: Formula) -> bool:
    with Cadical153(bootstrap_with=formula.clauses) as solver:
        return solver.solve()


def models(formula: Formula) -> int:
    """Brute force over all assignments, with numpy and nothing of ditbook."""
    bits = (np.arange(2**formula.variables)[:, None] >> np.arange(formula.variables)) & 1 == 1
    holds = np.ones(len(bits), dtype=bool)
    for clause in formula.clauses:
        holds &= np.any([bits[:, abs(x) - 1] == (x > 0) for x in clause], axis=0) if clause else False
    return int(holds.sum())


def satisfies(assignment, formula: Formula) -> bool:
    return {abs(x) for x in assignment} == set(range(1, formula.variables + 1)) and all(
        set(clause) & set(assignment) for clause in formula.clauses
    )


@pytest.fixture
def cnf(tmp_path):
    """Write text to a file and read it as DIMACS."""

    def read(text: str) -> Formula:
        path = tmp_path / "formula.cnf"
        path.write_text(text)
        return read_dimacs(path)

    return read


formulas = st.integers(0, 7).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(1, n).flatmap(lambda v: st.sampled_from((v, -v))), max_size=4).map(tuple)
        if n
        else st.just(()),
        max_size=8,
    ).map(lambda clauses: Formula(n, tuple(clauses)))
)


# Reading files


@pytest.mark.parametrize(
    "text",
    [
        "p cnf 3 2\n1 -2 0\n2 3 0\n",
        "c a comment\np cnf 3 2\n1 -2 0\nc another\n2 3 0\nc the last\n",
        "p cnf 3 2\n1 -2 0 2 3 0\n",
        "p cnf 3 2\n1\nc inside a clause\n-2\n0 2\n3\n0",
        "\n\n  p   cnf  3\t 2  \n\n   1   -2\t0  \n 2 3  0\n\n",
        "c\ncomment without a space\np cnf 3  2 \n 1 -2 0\n 2 3 0\n%\n0\n\n",
        "p cnf 3 2\r\n1 -2 0\r\n2 3 0\r\n%\r\n0\r\n",
        "p cnf 3 2\n1 -2 0 c to the end of the line\n2 3 0 c 5 0\n",
        "p cnf 3 2\n+1 -2 00\n02 3 0\n",
    ],
)
def test_every_dialect_reads_as_the_same_formula(cnf, text):
    assert cnf(text) == Formula(3, ((1, -2), (2, 3)))


def test_an_odd_byte_in_a_comment_does_no_harm(tmp_path):
    path = tmp_path / "latin.cnf"
    path.write_bytes(b"c Universit\xe4t\np cnf 1 1\n1 0\n")
    assert read_dimacs(str(path)) == Formula(1, ((1,),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "header .* found none"),
        ("c only comments\n", "header .* found none"),
        ("1 2 0\n", "line 1: expected a header .* got '1 2 0'"),
        ("1 2 0\np cnf 2 1\n", "line 1: expected a header"),
        ("p cnf 2\n", "expected the header .* got 'p cnf 2'"),
        ("p cnf two 1\n1 0\n", "line 1: expected an integer, got 'two'"),
        ("p cnf -2 0\n", "at least 0, got -2 and 0"),
        ("p wcnf 2 1\n1 1 0\n", "expected the header 'p cnf"),
        ("p cnf 2 1\np cnf 2 1\n1 0\n", "line 2: a second header"),
        ("p cnf 2 1\n1 x 0\n", "line 2: expected an integer, got 'x'"),
        ("p cnf 2 1\n1.0 0\n", "expected an integer, got '1.0'"),
        ("p cnf 12 1\n1_2 0\n", "expected an integer, got '1_2'"),
        ("p cnf 2 2\n1 0\n-2 3 0\n", "literal 3 of clause 2 is out of range 1 ... 2"),
        ("p cnf 2 1\n-7 0\n", "literal -7 of clause 1 is out of range 1 ... 2"),
        ("p cnf 2 3\n1 0\n2 0\n", "announces 3 clauses, the file has 2"),
        ("p cnf 2 1\n1 0\n2 0\n", "announces 1 clauses, the file has 2"),
        ("p cnf 2 1\n1 2\n", "the last clause, 1 2, does not end with 0"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused_with_the_reason(cnf, text, message):
    with pytest.raises(ValueError, match=message) as error:
        cnf(text)
    assert "formula.cnf" in str(error.value)


@settings(deadline=None, max_examples=60)
@given(formula=formulas, data=st.data())
def test_layout_carries_no_meaning(formula, data, tmp_path_factory):
    words = [str(x) for clause in formula.clauses for x in (*clause, 0)]
    gap = st.sampled_from((" ", "\n", "  \t", "\nc noise 1 0\n", "\n\n "))
    text = f"p cnf {formula.variables} {len(formula.clauses)}\n" + "".join(w + data.draw(gap) for w in words)
    path = tmp_path_factory.mktemp("dimacs") / "f.cnf"
    path.write_text(text)
    assert read_dimacs(path) == formula


def test_reader_agrees_with_python_sat_on_its_own_output(tmp_path, generator):
    formula = random_formula(12, 40, generator)
    CNF(from_clauses=formula.clauses).to_file(str(tmp_path / "f.cnf"), comments=["c written by python-sat"])
    assert read_dimacs(tmp_path / "f.cnf") == formula


# Splitting into orthogonal vectors


@settings(deadline=None, max_examples=60)
@given(formula=formulas)
def test_inner_products_count_the_clauses_that_an_assignment_violates(formula):
    a, b = orthogonal_vectors(formula)
    n, upper = formula.variables, (formula.variables + 1) // 2
    assert a.shape == (2**upper, len(formula.clauses))
    assert b.shape == (2 ** (n - upper), len(formula.clauses))
    for i, j in itertools.product(range(len(a)), range(len(b))):
        bits = i + (j << upper)
        true = {v if bits >> (v - 1) & 1 else -v for v in range(1, n + 1)}
        assert int(a[i] @ b[j]) == sum(not set(clause) & true for clause in formula.clauses)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (Formula(41, ((1, 2, 3),)), r"41 variables needs 2\^21 rows a side, more than 2\^20"),
        (Formula(10**12, ()), r"2\^500000000000 rows a side"),
        (Formula(40, ((1,),) * 1025), r"2\^20 rows a side of 1025 clauses are 1,074,790,400 entries"),
    ],
)
def test_instances_too_large_are_refused_before_anything_is_allocated(monkeypatch, formula, message):
    def never(*_):
        raise AssertionError("allocated")

    monkeypatch.setattr(hardness, "half_assignments", never)
    for call in (orthogonal_vectors, satisfiable):
        with pytest.raises(ValueError, match=message):
            call(formula)


# Orthogonal vectors to attention (book-1)


def test_the_output_is_the_reciprocal_of_one_plus_partners_plus_remainder(generator):
    a, b = (torch.randint(2, (64, 12), generator=generator).double() for _ in range(2))
    q, k, v = attention_instance(a, b, sharpness(64))
    assert k.shape == (65, 12)
    assert max(q.abs().max(), k.abs().max()) == pytest.approx(math.sqrt(2 * math.log(64)))
    o = softmax_attention(q, k, v, scale=1.0)[:, 0]
    overlap = (a @ b.T).long().tolist()
    for i, row in enumerate(overlap):
        m = row.count(0)
        r = sum(Fraction(1, 64) ** (2 * s) for s in row if s)  # exp(-2 s log 64)
        assert 0 <= r <= Fraction(1, 64)
        assert float(o[i]) == pytest.approx(float(1 / (1 + m + r)), rel=1e-12)
    assert partners(o, 64).tolist() == [row.count(0) for row in overlap]


@pytest.mark.parametrize("L", [2, 3, 8, 257])
def test_counts_survive_errors_below_the_stated_tolerance_and_not_above(L):
    m = torch.arange(L - 1, dtype=torch.float64)
    tolerance = (1 - 1 / L) / ((m + 1 + 1 / L) * (m + 2)) / 2
    low, high = 1 / (m + 1 + 1 / L), 1 / (m + 2)  # the least output with m partners, the largest with m + 1
    assert tolerance[0] == pytest.approx((L - 1) / (4 * (L + 1)))
    assert partners(low - 0.999 * tolerance, L).equal(m.long())
    assert partners(high + 0.999 * tolerance, L).equal(m.long() + 1)
    assert partners(low - 1.001 * tolerance, L).equal(m.long() + 1)


def test_outputs_at_or_below_zero_read_as_the_largest_count():
    assert partners(torch.tensor([0.0, -1.0, 2.0]), 5).tolist() == [5, 5, 0]


def test_the_remainder_reaches_its_bound_when_every_pair_shares_one_coordinate():
    L = 32
    ones = torch.ones(L, 1, dtype=torch.float64)
    o = softmax_attention(*attention_instance(ones, ones, sharpness(L)), scale=1.0)
    assert o.sub(L / (L + 1)).abs().max() < 1e-14


def test_scale_enters_the_entries_and_leaves_the_logits(generator):
    a, b = (torch.randint(2, (16, 9), generator=generator).double() for _ in range(2))
    plain, scaled = attention_instance(a, b, 3.0), attention_instance(a, b, 3.0, scale=1 / 9)
    assert float(scaled[0].max()) == pytest.approx(3 * float(plain[0].max()))
    o = [softmax_attention(*plain, scale=1.0), softmax_attention(*scaled, scale=1 / 9)]
    assert (o[0] - o[1]).abs().max() < 1e-14


# Formulas decided


def test_three_hundred_random_formulas_are_decided_as_by_python_sat(generator):
    answers = []
    for n, number in ((6, 60), (9, 60), (12, 60), (15, 60), (18, 40), (20, 16), (24, 4)):
        for ratio in torch.linspace(2, 7, number).tolist():
            formula = random_formula(n, round(ratio * n), generator)
            decision = satisfiable(formula)
            assert decision.satisfiable == bool(decision) == solver_says(formula) == (decision.model_count > 0)
            assert satisfies(decision.assignment, formula) if decision else decision.assignment is None
            answers.append(decision.satisfiable)
    assert len(answers) >= 300
    assert 60 <= sum(answers) <= len(answers) - 60


@pytest.mark.parametrize("n", [3, 6, 7, 10, 13, 16])
def test_model_counts_equal_brute_force(n, generator):
    for ratio in (0.5, 1, 2, 3, 4.27):
        formula = random_formula(n, round(ratio * n), generator)
        assert satisfiable(formula).model_count == models(formula)


@settings(deadline=None, max_examples=150)
@given(formula=formulas)
def test_any_small_formula_is_counted_and_its_assignment_holds(formula):
    decision = satisfiable(formula)
    assert decision.model_count == models(formula)
    assert satisfies(decision.assignment, formula) if decision else decision.assignment is None


@pytest.mark.parametrize(
    ("formula", "count"),
    [
        *((pigeonhole(holes + 1, holes), 0) for holes in (1, 2, 3, 4)),
        *((pigeonhole(holes, holes), math.factorial(holes)) for holes in (1, 2, 3, 4)),
        *((parity(rungs, odd=True), 0) for rungs in range(2, 8)),
        *((parity(rungs, odd=False), 2 ** (rungs + 1)) for rungs in range(2, 8)),
    ],
)
def test_pigeons_and_parities_have_their_known_counts(formula, count):
    assert satisfiable(formula).model_count == count
    assert solver_says(formula) == (count > 0)


@pytest.mark.parametrize(
    ("formula", "count"),
    [
        (Formula(0, ()), 1),
        (Formula(0, ((),)), 0),
        (Formula(5, ()), 32),
        (Formula(3, ((1, 2), ())), 0),
        (Formula(1, ((1,),)), 1),
        (Formula(1, ((1,), (-1,))), 0),
        (Formula(2, ((1, -1),)), 4),
    ],
)
def test_degenerate_formulas(formula, count):
    assert satisfiable(formula).model_count == count


def test_p_cnf_0_0_is_satisfiable_and_an_empty_clause_is_not(cnf):
    assert satisfiable(cnf("p cnf 0 0\n"))
    assert not satisfiable(cnf("p cnf 2 2\n1 2 0\n0\n"))


def test_attention_is_called_once_with_scale_one_and_entries_of_size_root_two_log_L(generator):
    calls = []

    def spy(q, k, v, *, scale):
        calls.append((q, k, v, scale))
        return softmax_attention(q, k, v, scale)

    formula = random_formula(11, 40, generator)
    satisfiable(formula, spy)
    ((q, k, v, scale),) = calls
    assert (q.shape, k.shape, v.shape, scale) == ((64, 40), (33, 40), (33, 40), 1.0)
    assert max(q.abs().max(), k.abs().max()) <= math.sqrt(2 * math.log(64)) + 1e-12


class LargestTensor(TorchDispatchMode):
    """Remembers the number of entries of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                self.entries = max(self.entries, item.numel())
        return result


def test_no_array_of_size_L_times_L_is_made(generator):
    formula = random_formula(22, 94, generator)
    with LargestTensor() as largest:
        satisfiable(formula)
    assert largest.entries <= 2 * 2048 * 128  # L x d, with room for padding; L x L is eight times as large


@pytest.mark.parametrize("sign", [-1, 1])
def test_an_attention_within_the_tolerance_of_book_1_still_decides(sign, generator):
    for ratio in (2, 4.27, 6):
        formula = random_formula(12, round(12 * ratio), generator)
        L = 64
        error = sign * 0.99 * (L - 1) / (4 * (L + 1))
        decision = satisfiable(formula, lambda *x, error=error, **y: softmax_attention(*x, **y) + error)
        assert decision.satisfiable == solver_says(formula)


def test_an_attention_too_coarse_to_trust_gives_no_assignment():
    decision = satisfiable(pigeonhole(3, 2), lambda q, k, v, scale: torch.full_like(q, 0.1))
    assert decision.satisfiable
    assert decision.assignment is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q, k, v, scale: torch.full_like(q, torch.nan), "finite numbers, got 72 that are not"),
        (lambda q, k, v, scale: torch.zeros(len(q), 2), r"shape \(8, 9\), got \(8, 2\)"),
    ],
)
def test_an_attention_that_returns_nonsense_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        satisfiable(pigeonhole(3, 2), wrong)


# The small-norm route (book-3)


@pytest.mark.parametrize("degree", [1, 2, 7, 20])
def test_weights_extrapolate_every_polynomial_exactly_in_rationals(degree):
    nodes = [Fraction(k + 2, degree + 5) for k in range(degree + 1)]
    weights = weights_at_zero(nodes)
    for power in range(degree + 1):
        assert sum(w * x**power for w, x in zip(weights, nodes, strict=True)) == (power == 0)


@pytest.mark.parametrize(("degree", "bound"), [(5, 0.7), (20, 1.0), (26, 2.0), (60, 2.5)])
def test_amplification_is_a_chebyshev_polynomial_below_the_stated_power(degree, bound):
    nodes = lobatto_nodes(degree, bound)
    assert float(nodes.max()) <= 1
    assert float(nodes.min()) >= math.exp(-(bound**2)) * (1 - 1e-12)
    amplification = sum(map(abs, weights_at_zero(nodes.tolist())))
    chebyshev = math.cosh(degree * math.acosh(1 / math.tanh(bound**2 / 2)))
    assert amplification == pytest.approx(chebyshev, rel=1e-8)
    assert amplification <= (1 / math.tanh(bound**2 / 4)) ** degree


@pytest.mark.parametrize("scaled", [False, True])
def test_counts_come_back_from_entries_at_most_two(scaled, generator):
    seen = []

    def spy(q, k, v, scale):
        seen.append(float(max(q.abs().max(), k.abs().max())))
        return softmax_attention(q, k, v, scale)

    formula = random_formula(16, 50, generator)
    a, b = orthogonal_vectors(formula)
    scale = 1 / a.shape[1] if scaled else 1.0
    estimate = small_norm_partners(a, b, 2.0, spy, scale)
    assert len(seen) == row_weight(a, b) + 1
    assert max(seen) == pytest.approx(2 / math.sqrt(scale))
    assert (estimate - (a @ b.T == 0).sum(dim=1)).abs().max() < 1e-9
    assert int(estimate.round().sum()) == models(formula)


def test_lists_without_common_coordinates_are_all_partners():
    zero = torch.zeros(4, 3)
    assert small_norm_partners(zero, torch.ones(4, 3), 1.0).tolist() == pytest.approx([4] * 4)


@pytest.mark.parametrize(("bound", "scale"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0)])
def test_bounds_that_mean_nothing_are_refused(bound, scale):
    with pytest.raises(ValueError, match="bound and scale must be positive"):
        small_norm_partners(torch.ones(2, 2), torch.ones(2, 2), bound, scale=scale)


# The families


def test_random_clauses_name_different_variables_with_both_signs(generator):
    formula = random_formula(10, 200, generator)
    assert all(len({abs(x) for x in clause}) == 3 for clause in formula.clauses)
    assert {x for clause in formula.clauses for x in clause} == {s * v for v in range(1, 11) for s in (1, -1)}
    with pytest.raises(ValueError, match="width must be between 1 and the number of variables, 2, got 3"):
        random_formula(2, 5, generator)


def test_small_ladders_are_refused():
    with pytest.raises(ValueError, match="rungs must be at least 2"):
        parity(1, odd=True)


# Planted faults: the chapter's own checks refuse them


def without_extra_key(a, b, beta, scale=1.0):
    q, k, v = attention_instance(a, b, beta, scale)
    return q, k[:-1], v[:-1]


def without_larger_entries(a, b, beta, scale=1.0):
    return attention_instance(a, b, beta)


def equally_spaced(degree, bound):
    return torch.linspace(1, math.exp(-(bound**2)), degree + 1, dtype=torch.float64)


@pytest.mark.parametrize("claim", ["book-1", "proposition-4.1"])
def test_a_quarter_of_the_sharpness_is_rejected(rejects, claim):
    rejects(CHAPTER, claim, {"ditbook.hardness.sharpness": lambda L: 0.5 * math.log(L)})


@pytest.mark.parametrize("claim", ["book-1", "proposition-4.1", "book-3"])
def test_a_missing_extra_key_is_rejected(rejects, claim):
    rejects(CHAPTER, claim, {"ditbook.hardness.attention_instance": without_extra_key})


def test_inverted_clause_coordinates_are_rejected(rejects):
    rejects(CHAPTER, "proposition-4.1", {"ditbook.hardness.falsified": lambda *args: 1 - falsified(*args)})


def test_a_cut_that_wastes_the_tolerance_is_rejected(rejects):
    rejects(CHAPTER, "book-2", {"ditbook.hardness.partners": lambda o, L: (1 / o - 1).round().clamp(0, L).long()})


@pytest.mark.parametrize(
    "fault",
    [
        {"ditbook.hardness.row_weight": lambda a, b: row_weight(a, b) // 2},
        {"ditbook.hardness.weights_at_zero": lambda nodes: [abs(w) for w in weights_at_zero(nodes)]},
        {"ditbook.hardness.lobatto_nodes": equally_spaced},
    ],
    ids=["half the degree", "signs dropped", "equally spaced nodes"],
)
def test_a_wrong_extrapolation_is_rejected(rejects, fault):
    rejects(CHAPTER, "book-3", fault)


def test_forgetting_to_enlarge_the_entries_under_one_over_d_is_rejected(rejects):
    rejects(CHAPTER, "book-4", {"ditbook.hardness.attention_instance": without_larger_entries})
