"""Covering numbers: bounds in log space against exact arithmetic, covers against brute force."""

import dataclasses
import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditbook import covering
from ditbook.covering import (
    NormProfile,
    greedy_cover,
    log10_log_covering_number,
    log10_log_parameter_cover,
    log10_xi,
)

PROFILE = NormProfile(3, 4, 2, 1, 1.3, 1.2, 0.7, 0.6, 1.5, 1.4, 2.0, 1.0)


def lemma_F6(p: NormProfile, n: int, L: int, eps: float) -> mpmath.mpf:
    """log N as the lemma states it, term by term."""
    total = mpmath.mpf(0)
    for i in range(p.blocks):
        alpha = (mpmath.mpf(p.C_F) ** 2 * p.C_OV * (1 + 4 * mpmath.mpf(p.C_KQ)) * (mpmath.mpf(p.C_X) + p.C_E)) ** i
        bracket = (
            mpmath.cbrt(p.d) ** 2 * mpmath.cbrt(p.C_F_2inf) ** 4
            + mpmath.cbrt(p.d) ** 2 * mpmath.cbrt(2 * mpmath.mpf(p.C_F) ** 2 * p.C_OV * p.C_KQ_2inf) ** 2
            + p.heads * mpmath.cbrt(p.head_size) ** 2 * mpmath.cbrt(mpmath.mpf(p.C_F) ** 2 * p.C_OV_2inf) ** 2
        )
        total += mpmath.cbrt(alpha) ** 2 * bracket
    return mpmath.log(mpmath.mpf(n) * L) / mpmath.mpf(eps) ** 2 * total**3


constants = st.floats(1e-3, 1e3)


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.integers(1, 30),
    sizes=st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8)),
    norms=st.tuples(*[constants] * 8),
    n=st.integers(2, 10**6),
    eps=st.floats(1e-4, 10),
)
def test_the_log_space_bound_equals_the_lemma_in_exact_arithmetic(blocks, sizes, norms, n, eps):
    profile = NormProfile(blocks, *sizes, *norms)
    with mpmath.workdps(40):
        expected = float(mpmath.log10(lemma_F6(profile, n, 5, eps)))
    assert log10_log_covering_number(profile, n, 5, eps) == pytest.approx(expected, abs=1e-9)


def test_a_growth_of_one_adds_equal_blocks():
    flat = dataclasses.replace(PROFILE, C_F=1.0, C_OV=0.2, C_KQ=1.0, C_X=0.5, C_E=0.5, blocks=7)
    one = dataclasses.replace(flat, blocks=1)
    gap = log10_log_covering_number(flat, 10, 2, 0.1) - log10_log_covering_number(one, 10, 2, 0.1)
    assert gap == pytest.approx(3 * math.log10(7))


def test_networks_too_large_for_floats_still_have_a_bound():
    deep = dataclasses.replace(PROFILE, blocks=10**300)
    assert 1e300 < log10_log_covering_number(deep, 10**500, 256, 1e-3) < math.inf
    huge_norms = dataclasses.replace(PROFILE, C_F=1e290, C_OV=1e290, C_F_2inf=1e290)
    assert math.isfinite(log10_log_covering_number(huge_norms, 10, 2, 0.1))
    assert math.isfinite(log10_log_parameter_cover(huge_norms, 4, 1.0, 0.1))
    assert log10_log_covering_number(dataclasses.replace(PROFILE, blocks=10**400), 10, 2, 0.1) == math.inf


def test_a_class_without_weights_has_the_printed_bound_zero():
    silent = dataclasses.replace(PROFILE, C_F=0.0, C_F_2inf=0.0, C_OV=0.0, C_OV_2inf=0.0)
    assert log10_log_covering_number(silent, 100, 2, 0.1) == -math.inf


@pytest.mark.parametrize(
    ("n", "L", "eps", "message"), [(0, 2, 0.1, "n must"), (10, 0, 0.1, "L must"), (10, 2, 0.0, "eps must")]
)
def test_sizes_out_of_range_are_named(n, L, eps, message):
    with pytest.raises(ValueError, match=message):
        log10_log_covering_number(PROFILE, n, L, eps)
    with pytest.raises(ValueError, match=message):
        log10_xi(n, eps, L)


def test_parameter_cover_needs_a_bias_bound_that_is_not_negative():
    with pytest.raises(ValueError, match="bias"):
        log10_log_parameter_cover(PROFILE, 4, -1.0, 0.1)


@pytest.mark.parametrize("n", [1, 1000, 10**12])
@pytest.mark.parametrize("eps", [0.9, 0.5, 0.3])
def test_xi_equals_its_definition_where_that_fits_in_a_float(n, eps):
    with mpmath.workdps(40):
        third = mpmath.mpf(n) ** (-mpmath.mpf(1) / 3)
        xi = third * 2 ** ((1 / mpmath.mpf(eps)) ** 4) + third + mpmath.mpf(eps) ** 2
        assert log10_xi(n, eps, 2) == pytest.approx(float(mpmath.log10(xi)), rel=1e-12, abs=1e-12)


def test_xi_never_overflows():
    assert log10_xi(1000, 0.1, 2) == pytest.approx(1e4 * math.log10(2) - 1)
    assert log10_xi(10**400, 0.01, 300) == math.inf


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.05, 2))
def test_a_greedy_cover_covers_and_is_separated(seed, eps):
    values = torch.randn(60, 4, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chosen = greedy_cover(values, eps)
    distance = (values[:, None] - values[None]).norm(dim=-1).amax(-1)
    assert (distance[:, chosen].amin(1) <= eps).all()
    between = distance[chosen][:, chosen] + torch.eye(len(chosen)) * 10
    assert (between > eps).all()


@pytest.mark.parametrize("eps", [0.5, 0.2, 0.1])
def test_lines_through_the_origin_have_the_known_covering_number(eps):
    lines = torch.linspace(-1, 1, 4001, dtype=torch.float64)[:, None] * torch.tensor([1.0, -0.4], dtype=torch.float64)
    assert math.ceil(1 / eps) <= len(greedy_cover(lines, eps)) <= math.ceil(2 / eps)


def random_weights(radius: float, bias: float, hidden: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One block with d = 3 and two heads, every matrix of operator norm ``radius``, every bias of norm ``bias``."""
    shapes = {"OV": (2, 3, 3), "KQ": (2, 3, 3), "W1": (hidden, 3), "W2": (3, hidden)}
    drawn = {k: torch.randn(*s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}
    weights = {k: radius * W / torch.linalg.matrix_norm(W, ord=2, keepdim=True) for k, W in drawn.items()}
    biases = {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in (("b1", hidden), ("b2", 3))}
    return weights | {k: bias * b / b.norm() for k, b in biases.items()}


def run_block(X: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = torch.einsum("...ka,hab,...qb->...hqk", X, p["KQ"], X)
    Y = X + torch.einsum("...hqk,...kb,hab->...qa", logits.softmax(-1), X, p["OV"])
    return Y + torch.relu(Y @ p["W1"].mT + p["b1"]) @ p["W2"].mT + p["b2"]


@pytest.mark.parametrize("radius", [0.5, 2.0])
def test_networks_within_the_resolution_of_the_parameter_cover_are_within_eps(radius, generator):
    """The proof's eta, recomputed from the module's pieces, against networks perturbed by exactly eta."""
    K, hidden, bias, eps = 3, 4, 0.5, 0.01
    profile = NormProfile(K, 3, 2, 1, radius, radius, radius, radius, radius, radius, 0.0, 1.0)
    slope, stretch = covering._log_parameter_slope(profile, bias), covering._log_lipschitz(profile, bias)
    eta = eps / (K * math.exp(slope + K * stretch))
    X = torch.randn(20, 5, 3, generator=generator, dtype=torch.float64)
    X = X / X.norm(dim=-1, keepdim=True)
    for _ in range(5):
        first, second = X, X
        for _ in range(K):
            base = random_weights(radius - eta, bias - eta, hidden, generator)
            shift = random_weights(eta, eta, hidden, generator)
            first, second = run_block(first, base), run_block(second, {k: base[k] + shift[k] for k in base})
        assert first.norm(dim=-1).max() <= math.exp(covering._log_token_norm(profile, bias))
        assert (first - second).norm(dim=-1).max() <= eps


def test_parameter_cover_at_one_block_equals_the_count_by_hand():
    p, hidden, bias, eps = dataclasses.replace(PROFILE, blocks=1), 4, 0.5, 0.1
    rho = (1 + p.C_F**2) * (1 + p.heads * p.C_OV) * (p.C_X + p.C_E + (1 + p.C_F) * bias)
    lipschitz = (1 + p.C_F**2) * (1 + p.heads * p.C_OV * (1 + 2 * p.C_KQ * rho**2))
    slope = (1 + p.C_F**2) * p.heads * rho * (1 + p.C_OV * rho**2) + 2 * p.C_F * rho + p.C_F + bias + 1
    eta = eps / (slope * lipschitz)
    counts = [(32, p.C_OV), (32, p.C_KQ), (2 * 4 * hidden, p.C_F), (hidden + 4, bias)]
    log_N = sum(count * math.log(1 + 2 * radius / eta) for count, radius in counts)
    assert log10_log_parameter_cover(p, hidden, bias, eps) == pytest.approx(math.log10(log_N))


class TestPlantedFaults:
    def test_alpha_taken_once_instead_of_squared(self, rejects):
        growth = covering.log_block_growth
        rejects("f-2-covering", "lemma-F.6", {"ditbook.covering.log_block_growth": lambda p: growth(p) / 2})

    def test_dropped_powers_of_the_value_norm(self, rejects):
        def without_C_OV(p):
            return 2 * math.log(p.C_F) + math.log(1 + 4 * p.C_KQ) + math.log(p.C_X + p.C_E)

        rejects("f-2-covering", "lemma-F.6", {"ditbook.covering.log_block_growth": without_C_OV})

    def test_a_cover_that_keeps_too_few_functions(self, rejects):
        rejects("f-2-covering", "definition-F.1", {"ditbook.covering.greedy_cover": lambda values, eps: [0]})

    def test_a_cover_that_keeps_every_function(self, rejects):
        every = {"ditbook.covering.greedy_cover": lambda values, eps: list(range(len(values)))}
        rejects("f-2-covering", "definition-F.1", every)
