"""The threshold chapter: its small tools against independent counts, and faults that its checks must reject."""

import math

import jupytext
import numpy as np
import pytest
import torch
from chapters import NOTEBOOKS, run_claim

from ditbook import attention

CHAPTER = "4-2-inference"


@pytest.fixture(scope="module")
def tools() -> dict:
    """The chapter's own functions: the cells that define them, none of which runs a study."""
    functions = (
        "uniform operations counted least_error feature_exponent left_factors rank_needed rank_from_above shells"
    )
    starts = ["import csv", 'scale = "quick"', *(f"def {name}(" for name in functions.split())]
    namespace: dict = {"__name__": "__chapter__"}
    for cell in jupytext.read(NOTEBOOKS / f"{CHAPTER}.md").cells:
        if cell.cell_type == "code" and any(start in cell.source for start in starts):
            exec(compile(cell.source, CHAPTER, "exec"), namespace)
    return namespace


# --- the tools --------------------------------------------------------------------------------------------------


def test_work_counts_products_entries_and_nothing_for_views(tools):
    counted, a, b = tools["counted"], torch.randn(3, 5), torch.randn(5, 7)
    assert counted(lambda: a @ b)[1] == 3 * 5 * 7
    assert counted(lambda: torch.addmm(torch.ones(7), a, b))[1] == 3 * 5 * 7 + 7
    assert counted(lambda: a.T.unsqueeze(0)[..., 1:].exp())[1] == 2 * 5
    assert counted(lambda: torch.tanh(a))[1] == 15
    assert counted(lambda: torch.linalg.solve_triangular(torch.eye(5), b, upper=False))[1] == pytest.approx(
        25 + 5 * 7 * 5 / 2
    )


def test_the_count_of_exact_attention_is_the_formula_used_beside_it(tools):
    q = torch.randn(300, 8)
    work = tools["counted"](lambda: attention.softmax_attention(q, q, q, scale=1.0))[1]
    assert work == pytest.approx(300**2 * 17, rel=0.1)  # the checks of the inputs are counted as well


@pytest.mark.parametrize("factor", [0.2, 1.0])
def test_the_rank_is_the_first_whose_rows_are_close_enough(tools, factor, generator):
    q, k = (torch.randn(60, 6, generator=generator, dtype=torch.float64) for _ in "qk")
    P = tools["attention_matrix"](q, k, factor)
    torch.testing.assert_close(P, torch.softmax(factor * q @ k.T, -1))
    U, S, V = torch.linalg.svd(P)
    errors = [(P - (U[:, :r] * S[:r]) @ V[:r]).abs().sum(1).max() for r in range(61)]
    assert tools["rank_needed"](P) == next(r for r, e in enumerate(errors) if e <= 60**-0.5)


def test_dropping_small_singular_values_finds_the_same_rank(tools, generator):
    q, k = (2.0 * torch.randint(2, (80, 9), generator=generator) - 1 for _ in "qk")
    P = tools["attention_matrix"](q.double(), k.double(), 1.0)
    rank = tools["rank_needed"](P)
    assert tools["rank_from_above"](P, 40) == rank
    low = tools["attention_matrix"](q.double(), k.double(), 0.02)
    assert tools["rank_from_below"](low, 30) == pytest.approx(tools["rank_needed"](low), abs=1)


def test_the_closed_form_counts_every_singular_value(tools):
    for d in (3, 6, 8):
        values = np.sort([value for value, count in tools["shells"](d, 1.0) for _ in range(count)])
        assert len(values) == 2**d
        dropped = int((np.cumsum(values**2) <= 1).sum())
        assert tools["frobenius_floor"](d, 1.0) == 2**d - dropped
        assert values.max() == 1


def test_features_are_counted_as_binomials(tools):
    log_L, power = 12.0, 1.0
    degree = next(g for g in range(200) if math.exp(1) / math.factorial(g + 1) <= math.exp(-power * log_L))
    expected = math.log(math.comb(24 + degree, degree)) / log_L
    assert tools["feature_exponent"](log_L, power) == pytest.approx(expected)


def test_no_polynomial_beats_the_bound_from_the_peaks(tools):
    """Against least squares with other weights, and against the best constant, which is known."""
    constant = tools["least_error"](1.0, attention.exp_polynomial(1.0, 0))
    assert constant <= math.tanh(1.0) + 1e-9  # c exp(-x) - 1 balanced between the ends
    x = np.linspace(-2, 2, 4001)
    floor = tools["least_error"](2.0, attention.exp_polynomial(2.0, 4))
    for weight in (1.0, np.exp(-x), np.exp(-x) / (2.1 - np.abs(x))):
        coefficients = np.polynomial.polynomial.polyfit(x, np.exp(x), 4, w=weight * np.ones_like(x))
        gap = np.abs(np.polynomial.polynomial.polyval(x, coefficients) * np.exp(-x) - 1).max()
        assert gap >= floor > 0


# --- planted faults ---------------------------------------------------------------------------------------------


def edited(old: str, new: str):
    """``jupytext.read`` that finds one piece of the chapter's code replaced."""
    read = jupytext.read

    def wrong(path):
        notebook = read(path)
        hits = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
        assert len(hits) == 1, f"{old!r} stands in {len(hits)} cells"
        hits[0].source = hits[0].source.replace(old, new)
        return notebook

    return wrong


exact = attention.softmax_attention


class TestPlantedFaults:
    def test_scale_forgotten_in_one_branch(self, rejects):
        def forgetful(q, k, v, scale=None):
            return exact(q, k, v, 1.0 if scale is not None and scale < 1 else scale)

        rejects(CHAPTER, "erratum-3", {"ditbook.attention.softmax_attention": forgetful})

    def test_scale_forgotten_for_the_cube(self, rejects):
        def forgetful(q, k, v, scale=None):
            return exact(q, k, v, 1.0)

        rejects(CHAPTER, "erratum-31", {"ditbook.attention.softmax_attention": forgetful})

    def test_the_default_scale_in_place_of_none(self, rejects):
        def default(q, k, v, scale=None):
            return exact(q, k, v)

        rejects(CHAPTER, "book-6", {"ditbook.attention.softmax_attention": default})

    def test_rank_relative_to_the_largest_singular_value(self, rejects):
        old = "[rank_needed(attention_matrix(B * ruler_q, B * ruler_k, 1.0)) for B in ruler_B]"
        wrong = edited(old, "[relative_rank(torch.exp(B**2 * (ruler_q @ ruler_k.T))) for B in ruler_B]")
        rejects(CHAPTER, "erratum-3", {"chapters.jupytext.read": wrong})

    def test_rank_by_singular_values_and_not_by_rows(self, rejects):
        wrong = edited("if smaller.abs().sum(dim=1).max() <=", "if torch.linalg.matrix_norm(smaller, 2) <= len(P) *")
        rejects(CHAPTER, "erratum-3", {"chapters.jupytext.read": wrong})

    def test_four_mechanisms_at_unequal_cost(self, rejects):
        wrong = edited("{name: size_for(name) for name in MECHANISMS}", "{name: 495 for name in MECHANISMS}")
        rejects(CHAPTER, "problem-2", {"chapters.jupytext.read": wrong})

    def test_softmax_normalised_over_queries(self, rejects):
        def wrong_axis(q, k, v, scale=None):
            return torch.softmax(scale * (q @ k.mT), dim=-2) @ v

        rejects(CHAPTER, "equation-4.5", {"ditbook.attention.softmax_attention": wrong_axis})

    def test_an_answer_outside_the_tolerance(self, rejects):
        fast = attention.almost_linear_attention

        def off(*arguments, **options):
            output, note = fast(*arguments, **options)
            return output + 0.002, note

        rejects(CHAPTER, "problem-2", {"ditbook.attention.almost_linear_attention": off})

    def test_always_exact_is_no_solver(self, rejects):
        rejects(CHAPTER, "problem-2", {"ditbook.attention._by_low_rank": lambda head: (None, 0.0)})

    def test_a_polynomial_far_from_the_best(self, rejects):
        def taylor(bound, degree):
            coefficients = tuple(1 / math.factorial(j) for j in range(degree + 1))
            x = np.linspace(-bound, bound, 4001)
            gap = np.abs(np.polynomial.polynomial.polyval(x, coefficients) * np.exp(-x) - 1).max()
            return attention.Polynomial(coefficients, float(gap))

        rejects(CHAPTER, "proposition-4.2", {"ditbook.attention.exp_polynomial": taylor})

    def test_a_certificate_from_squared_residuals(self, rejects):
        distances = attention.residuals
        rejects(
            CHAPTER, "book-5", {"ditbook.attention.residuals": lambda factors, rows: distances(factors, rows).square()}
        )

    def test_a_rank_that_does_not_depend_on_the_dimension(self, rejects):
        wrong = edited("uniform(remark_L, d, draw), uniform(remark_L, d, draw)", "*(2 * [uniform(remark_L, 4, draw)])")
        rejects(CHAPTER, "remark-4.5", {"chapters.jupytext.read": wrong})

    def test_a_bound_that_fails_its_run(self, rejects):
        rejects(CHAPTER, "erratum-4", {"ditbook.attention.Polynomial.error_bound": property(lambda self: 0.1)})

    def test_the_argument_lists_made_equal(self, rejects):
        wrong = edited('{"L_p", "L", "d", "Gamma"}', '{"L", "d", "Gamma", "epsilon"}')
        rejects(CHAPTER, "erratum-29", {"chapters.jupytext.read": wrong})


@pytest.mark.parametrize("claim", ["equation-4.5", "book-5", "book-6", "erratum-29", "erratum-31"])
def test_without_faults_the_cheap_checks_pass_for_another_seed(claim):
    run_claim(CHAPTER, claim, seed=1)
