"""Almost-linear attention against exact attention in double precision, and its certificate against planted faults."""

import itertools
import math
import resource
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from ditbook import attention
from ditbook.attention import (
    Polynomial,
    almost_linear_attention,
    centre,
    exp_factors,
    exp_polynomial,
    factorise,
    key_moments,
    leading_error,
    low_rank_attention,
    residual_bound,
    smallest_rank,
    softmax_attention,
)

# Norms that leave the low-rank method a chance at 2048 tokens; beyond them exact attention is right, and slow here.
B = {4: 0.6, 8: 0.35}


def uniform(L, d, generator):
    return [B[d] * (2 * torch.rand(L, d, generator=generator, dtype=torch.float64) - 1) for _ in "qk"]


def shifted(L, d, generator):
    return [x + 2 for x in uniform(L, d, generator)]


def clustered(L, d, generator):
    centres = torch.randn(6, d, generator=generator, dtype=torch.float64) * 0.6
    picks = [torch.randint(6, (L,), generator=generator) for _ in "qk"]
    return [centres[i] + 0.05 * torch.randn(L, d, generator=generator, dtype=torch.float64) for i in picks]


def heavy_tailed(L, d, generator):
    """Student's t with three degrees of freedom."""
    chi = [torch.randn(L, 3, generator=generator, dtype=torch.float64).square().mean(1, keepdim=True) for _ in "qk"]
    return [0.1 * torch.randn(L, d, generator=generator, dtype=torch.float64) / x.sqrt() for x in chi]


INPUTS = [uniform, shifted, clustered, heavy_tailed]


def values(L, d, generator):
    return 2 * torch.rand(L, d, generator=generator, dtype=torch.float64) - 1


def truth(q, k, v, scale=1.0):
    """Softmax attention as it is defined, in double precision."""
    return torch.softmax(scale * q.double() @ k.double().mT, dim=-1) @ v.double()


def error(output, q, k, v, scale=1.0):
    """In the unit of the tolerance."""
    return float((output.double() - truth(q, k, v, scale)).abs().max() / max(1.0, float(v.abs().max())))


# --- exact attention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 7, 3, 3), (300, 40, 4, 2), (700, 700, 2, 5)])
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_exact_attention_is_the_definition(shape, batch, generator):
    Lq, Lk, d, dv = shape
    q, k, v = (torch.randn(*batch, n, m, generator=generator).double() for n, m in ((Lq, d), (Lk, d), (Lk, dv)))
    for scale in (None, 1.0, 1 / d, -0.3):
        expected = truth(q, k, v, d**-0.5 if scale is None else scale)
        torch.testing.assert_close(softmax_attention(q, k, v, scale), expected, rtol=1e-12, atol=1e-12)


def test_exact_attention_weights_are_finite_for_huge_logits(generator):
    q, k, v = (torch.randn(20, 3, generator=generator) for _ in range(3))
    nearest = v[(1e4 * q @ k.T).argmax(-1)]
    torch.testing.assert_close(softmax_attention(1e4 * q, k, v, 1.0), nearest)


# --- the tolerance holds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("inputs", INPUTS)
def test_error_stays_below_every_tolerance(inputs, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = inputs(2048, 4, generator)
    v = values(2048, 3, generator)
    exact = truth(q, k, v)
    for tolerance, dtype in (
        (1e-2, torch.float32),
        (1e-3, torch.float32),
        (1e-4, torch.float32),
        (1e-8, torch.float64),
    ):
        output, certificate = almost_linear_attention(
            *(t.to(dtype) for t in (q, k, v)), 1.0, tolerance, return_certificate=True
        )
        assert output.dtype == dtype
        assert float((output - exact).abs().max()) <= tolerance
        assert certificate.sampled_error <= tolerance / 2
        # Where many outliers make the kernel high-rank, exact attention is the right answer.
        assert certificate.method != "exact" or inputs is heavy_tailed or tolerance == 1e-8


@pytest.mark.parametrize("seed", range(5))
def test_error_stays_below_the_tolerance_in_a_batch_of_unlike_heads(seed):
    generator = torch.Generator().manual_seed(seed)
    pairs = [inputs(2048, 8, generator) for inputs in (uniform, shifted, clustered, heavy_tailed)]
    q, k = (torch.stack(side).unflatten(0, (2, 2)).float() for side in zip(*pairs, strict=True))
    v = torch.stack([values(2048, 5, generator) for _ in range(4)]).unflatten(0, (2, 2)).float()
    exact = truth(q, k, v)
    for tolerance in (1e-2, 1e-3, 1e-4):
        output, certificate = almost_linear_attention(q, k, v, 1.0, tolerance, return_certificate=True)
        assert output.shape == q.shape[:-1] + v.shape[-1:]
        assert float((output - exact).abs().max()) <= tolerance
        assert 0 <= certificate.fast_share <= 1
        assert (certificate.method == "mixed") == (0 < certificate.fast_share < 1)


def test_the_unit_of_the_tolerance_grows_with_the_values(generator):
    q, k = uniform(2048, 4, generator)
    v = 1e6 * values(2048, 4, generator)
    output, certificate = almost_linear_attention(q, k, v, 1.0, return_certificate=True)
    assert certificate.method == "low-rank"
    assert error(output, q, k, v) <= 1e-3


def test_cross_attention_of_unequal_lengths(generator):
    q, k = uniform(6000, 4, generator)[0], uniform(1500, 4, generator)[1]
    v = values(1500, 2, generator)
    output, certificate = almost_linear_attention(q, k, v, 1.0, return_certificate=True)
    assert output.shape == (6000, 2)
    assert certificate.method == "low-rank"
    assert error(output, q, k, v) <= 1e-3


def test_structured_values_are_as_good_as_random_ones(generator):
    """Random values average errors out; the sign of a coordinate does not."""
    q, k = uniform(2048, 4, generator)
    v = k.sign()
    output, certificate = almost_linear_attention(q, k, v, 1.0, return_certificate=True)
    assert certificate.method == "low-rank"
    assert error(output, q, k, v) <= 1e-3


def test_queries_much_larger_than_keys_cost_no_accuracy(generator):
    """Balancing finds the scale of each coordinate: queries times a matrix, keys times its inverse transpose."""
    q, k = uniform(2048, 4, generator)
    stretch = torch.diag(torch.tensor([30.0, 1.0, 1.0, 0.02], dtype=torch.float64))
    plain, stretched = (
        almost_linear_attention(a, b, values(2048, 2, torch.Generator().manual_seed(1)), 1.0, return_certificate=True)[
            1
        ]
        for a, b in ((q, k), (q @ stretch, k @ torch.linalg.inv(stretch)))
    )
    assert plain.method == stretched.method == "low-rank"
    assert stretched.rank <= 1.5 * plain.rank


def test_scale_none_is_torchs(generator):
    q, k, v = (torch.randn(3000, 4, generator=generator) for _ in range(3))
    torch.testing.assert_close(
        almost_linear_attention(q, k, v, tolerance=1e-3), truth(q, k, v, 0.5).float(), atol=1e-3 * 5, rtol=0
    )


def test_same_generator_same_answer_and_the_global_one_is_left_alone(generator):
    q, k = (t.float() for t in uniform(2048, 4, generator))
    v = values(2048, 4, generator).float()
    state = torch.get_rng_state()
    outputs = [almost_linear_attention(q, k, v, 1.0, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(almost_linear_attention(q, k, v, 1.0), almost_linear_attention(q, k, v, 1.0))
    assert torch.equal(state, torch.get_rng_state())


def test_memory_is_linear(generator):
    """65,536 tokens: a matrix of weights would have 16 GiB."""
    q, k = (t.float() for t in uniform(65536, 4, generator))
    v = values(65536, 4, generator).float()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, certificate = almost_linear_attention(q, k, v, 1.0, return_certificate=True)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert certificate.method == "low-rank"
    assert grown < 2**28


# --- the choice of the method -----------------------------------------------------------------------------------


def test_the_fast_path_is_taken_wherever_its_predicted_gain_is_at_least_two(generator):
    """The benchmark's grid of d and B, at a length that tests can afford."""
    fast = 0
    grid = list(itertools.product((4, 8, 16), (0.5, 0.7, 1.0, 2.0)))
    for d, size in grid:
        q, k, v = (2 * torch.rand(8192, d, generator=generator) - 1 for _ in range(3))
        output, certificate = almost_linear_attention(size * q, size * k, v, 1.0, return_certificate=True)
        assert (certificate.method != "exact") == (certificate.predicted_gain >= attention.MIN_GAIN), (
            d,
            size,
            certificate,
        )
        sample = torch.arange(0, 8192, 32)
        assert error(output[sample], size * q[sample], size * k, v) <= 1e-3
        fast += certificate.method != "exact"
    assert fast >= 5


def test_polynomials_serve_small_logits_and_few_dimensions(generator):
    for d, size in ((1, 1.0), (2, 1.0), (8, 0.1)):
        q, k, v = (2 * torch.rand(3000, d, generator=generator) - 1 for _ in range(3))
        output, certificate = almost_linear_attention(size * q, size * k, v, 1.0, return_certificate=True)
        assert certificate.method == "polynomial"
        assert certificate.degree % 2 == 0
        assert certificate.rank == math.comb(d + certificate.degree, d)
        assert error(output, size * q, size * k, v) <= certificate.error_bound <= 5e-4


def test_large_logits_short_sequences_and_fine_tolerances_are_answered_exactly(generator):
    cases = [
        (3000, 8, 4.0, 1e-3, torch.float64),
        (500, 4, 0.5, 1e-3, torch.float64),
        (3000, 4, 0.5, 1e-6, torch.float32),
    ]
    for L, d, size, tolerance, dtype in cases:
        q, k, v = (2 * torch.rand(L, d, generator=generator, dtype=dtype) - 1 for _ in range(3))
        output, certificate = almost_linear_attention(size * q, size * k, v, 1.0, tolerance, return_certificate=True)
        assert (certificate.method, certificate.rank, certificate.degree) == ("exact", None, None)
        assert certificate.error_bound is None
        assert certificate.predicted_gain < attention.MIN_GAIN
        assert torch.equal(output, softmax_attention(size * q, size * k, v, 1.0))


def test_constant_queries_average_the_values(generator):
    k, v = (torch.randn(3000, 3, generator=generator) for _ in range(2))
    output = almost_linear_attention(torch.zeros(3000, 3), k, v, 1.0)
    torch.testing.assert_close(output, v.mean(0).expand(3000, 3), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [0.5, 0.7, 1.0])
def test_rank_is_at_most_three_times_the_svd_floor(size):
    """The floor: the smallest rank at which the truncated SVD of the softmax matrix meets the same error."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        q, k = (size * values(2048, 4, generator) for _ in "qk")
        v = values(2048, 4, generator)
        output, certificate = almost_linear_attention(q.float(), k.float(), v.float(), 1.0, return_certificate=True)
        assert certificate.method == "low-rank"
        allowed = error(output, q, k, v)
        # The leading singular vectors by subspace iteration: a whole SVD takes a minute.
        U, S, V = torch.svd_lowrank(torch.softmax(q @ k.T, -1), 100, niter=3)
        U, V, exact = U * S, V.T @ v, truth(q, k, v)
        floor = next(r for r in range(1, 101) if float((U[:, :r] @ V[:r] - exact).abs().max()) <= allowed)
        assert certificate.rank <= 3 * floor, (certificate.rank, floor)


# --- the pieces -------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), d=st.integers(1, 5), offset=st.floats(-3, 3), stretch=st.floats(-2, 2))
def test_centring_and_balancing_leave_attention_alone(seed, d, offset, stretch):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, d, generator=generator, dtype=torch.float64) for n in (30, 40, 40))
    q, k = q * math.exp(stretch) + offset, k + offset
    centred = centre(q, k, 0.3, generator)
    weights = (centred.queries @ centred.keys.T).exp() * centred.weights
    torch.testing.assert_close(weights @ v / weights.sum(-1, keepdim=True), truth(q, k, v, 0.3), atol=1e-10, rtol=1e-8)
    assert float(centred.weights.max()) == 1.0


def test_balancing_equalises_the_second_moments(generator):
    q, k = (
        torch.randn(500, 3, generator=generator).double() @ torch.randn(3, 3, generator=generator).double()
        for _ in "qk"
    )
    A = attention.balance(q, k)
    left, right = q @ A, k @ torch.linalg.inv(A).T
    torch.testing.assert_close(left.T @ left, right.T @ right, rtol=0.05, atol=0.05 * float(left.square().sum()) / 3)


@pytest.mark.parametrize("inputs", INPUTS)
def test_factors_give_the_softmax_matrix_within_the_residual_bound(inputs, generator):
    """book-5, entry by entry: |error of G_ij| <= sqrt(R_ii R_jj), and its consequence for outputs."""
    q, k = inputs(400, 4, generator)
    factors = exp_factors(q, k, 40, 1.0)
    Phi_q, Phi_k = factors.query_features(), factors.key_features()
    G = (-torch.cdist(factors.queries[:, :-2], factors.keys[:, :-2]).square() / 2).exp() * factors.weights
    torch.testing.assert_close(G / G.sum(-1, keepdim=True), torch.softmax(q @ k.T, -1), atol=1e-10, rtol=1e-6)
    H, R_q, R_k = (side @ factors.solve(other.T) for side, other in ((Phi_q, Phi_k), (Phi_q, Phi_q), (Phi_k, Phi_k)))
    R_q = (1 - R_q.diagonal()).clamp_min(0)
    R_k = (1 - R_k.diagonal() / factors.weights**2).clamp_min(0)
    assert ((G - H).abs() <= (R_q[:, None] * R_k).sqrt() * factors.weights * (1 + 1e-6) + 1e-10).all()
    v = values(400, 3, generator)
    bound = residual_bound(factors)
    if bound is not None:
        gap = low_rank_attention(factors, key_moments(factors, v)) - truth(q, k, v)
        assert float(gap.abs().max()) <= bound + 1e-9
    else:
        assert (H.sum(-1) <= 0).any()


def test_pivots_that_rounding_makes_dependent_leave_usable_factors():
    """Many pivots in few dimensions: the Gram matrix of what is kept may still be indefinite by rounding."""
    for seed in (26, 27, 28):
        g = torch.Generator().manual_seed(seed)
        q, k = (0.7 * (2 * torch.rand(500, 2, generator=g, dtype=torch.float64) - 1) for _ in "qk")
        v = values(500, 2, g)
        factors = exp_factors(q, k, 64, 1.0)
        assert error(low_rank_attention(factors, key_moments(factors, v)), q, k, v) <= 1e-8
    indefinite = torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-12]], dtype=torch.float64)
    core = attention._cholesky(indefinite, 1e-10)
    torch.testing.assert_close(core @ core.mT, indefinite, atol=1e-8, rtol=0)


def test_huge_logits_are_answered_exactly(generator):
    q, k = uniform(2048, 4, generator)
    v = values(2048, 4, generator)
    output, certificate = almost_linear_attention(300 * q, 300 * k, v, 1.0, return_certificate=True)
    assert certificate.method == "exact"
    assert torch.equal(output, softmax_attention(300 * q, 300 * k, v, 1.0))


def test_leading_factors_are_factors(generator):
    q, k = uniform(300, 4, generator)
    factors = exp_factors(q, k, 48, 1.0).truncate(20)
    assert factors.rank == 20
    gram = (-torch.cdist(factors.pivots, factors.pivots).square() / 2).exp()
    torch.testing.assert_close(factors.core @ factors.core.T, gram, atol=1e-9, rtol=0)
    rows = torch.tensor([5, 0, 7])
    torch.testing.assert_close(factors.query_features(rows), factors.query_features()[rows])
    torch.testing.assert_close(factors.key_features(slice(3, 9)), factors.key_features()[3:9])


def test_dependent_pivots_are_dropped():
    """Two different queries and two different keys have four places to put pivots."""
    q = torch.zeros(200, 3, dtype=torch.float64)
    q[100:] = 1.0
    assert exp_factors(q, q, 64, 1.0).rank <= 4


def test_errors_of_leading_factors_are_those_of_their_outputs(generator):
    q, k = uniform(2048, 4, generator)
    v = values(2048, 3, generator)
    tests = attention.Tests(torch.arange(2048), truth(q, k, v))
    factors = exp_factors(q, k, 64, 1.0)
    moments = key_moments(factors, v)
    rank = smallest_rank(factors, moments, tests, 1e-4)
    for r in (3, rank, 64):
        output = low_rank_attention(factors.truncate(r), moments[:r])
        assert error(output, q, k, v) == pytest.approx(leading_error(factors, moments, tests, r), rel=1e-9)
    assert leading_error(factors, moments, tests, rank) <= 1e-4 < leading_error(factors, moments, tests, rank - 2)


def safe(polynomial: Polynomial, bound: float) -> None:
    """What a polynomial must satisfy: its claimed relative error, and a positive sign far beyond the interval."""
    t = np.linspace(-bound, bound, 20011)
    gap = np.abs(np.polynomial.polynomial.polyval(t, polynomial.coefficients) * np.exp(-t) - 1).max()
    assert gap <= polynomial.relative_error * 1.001 + 1e-9
    assert (np.polynomial.polynomial.polyval(20 * t, polynomial.coefficients) > 0).all()


@pytest.mark.parametrize("bound", [0.1, 1.0, 3.0, 7.0])
def test_polynomials_keep_their_relative_error_and_stay_positive(bound):
    errors = []
    for degree in range(2, 13, 2):
        polynomial = exp_polynomial(bound, degree)
        errors.append(polynomial.relative_error)
        if 1e-12 < polynomial.relative_error < 1:
            safe(polynomial, bound)
        taylor = sum((-bound) ** j / math.factorial(j) for j in range(degree + 1)) * math.exp(bound) - 1
        assert polynomial.relative_error <= abs(taylor) or abs(taylor) < 1e-12
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(errors))


def test_monomials_sum_to_powers_of_the_inner_product(generator):
    """The expansion against the polynomial evaluated at every logit."""
    q, k = uniform(50, 4, generator)
    v = values(50, 3, generator)
    polynomial = Polynomial((0.9, 1.1, 0.4, 0.2, 0.1), 0.0)
    centred = centre(q, k, 1.0, generator)
    logits = centred.queries @ centred.keys.T
    weights = sum(c * logits**j for j, c in enumerate(polynomial.coefficients)) * centred.weights
    expected = weights @ v / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(attention.polynomial_attention(centred, v, polynomial), expected, atol=1e-12, rtol=1e-10)


# --- planted faults ---------------------------------------------------------------------------------------------


def fast_and_accurate(inputs, d, tolerance=1e-3, dtype=torch.float32):
    """The check that the faults below must not pass."""
    generator = torch.Generator().manual_seed(0)
    q, k = (t.to(dtype) for t in inputs(2048, d, generator))
    v = values(2048, d, generator).to(dtype)
    output, certificate = almost_linear_attention(q, k, v, 1.0, tolerance, return_certificate=True)
    assert certificate.method != "exact"
    assert error(output, q, k, v) <= tolerance


def wide(L, d, generator):
    """Logits up to 7 in absolute value."""
    return [math.sqrt(7) * x for x in (2 * torch.rand(2, L, d, generator=generator, dtype=torch.float64) - 1)]


def tiny_shifted(L, d, generator):
    return [0.1 * x + 2 for x in (2 * torch.rand(2, L, d, generator=generator, dtype=torch.float64) - 1)]


def test_without_faults_the_check_passes():
    for inputs, d, dtype in ((wide, 1, torch.float64), (shifted, 4, torch.float32), (tiny_shifted, 4, torch.float32)):
        fast_and_accurate(inputs, d, dtype=dtype)


def absolute_chebyshev(bound, degree):
    """The interpolant whose *absolute* error is small, with that error as its claim."""
    in_t = np.polynomial.chebyshev.cheb2poly(
        np.polynomial.chebyshev.chebinterpolate(lambda t: np.exp(bound * t), degree)
    )
    t = np.linspace(-1, 1, 2001)
    gap = np.abs(np.polynomial.polynomial.polyval(t, in_t) - np.exp(bound * t)).max()
    return Polynomial(tuple(in_t / bound ** np.arange(degree + 1)), float(gap))


def test_fault_absolute_error_chebyshev_coefficients(monkeypatch):
    monkeypatch.setattr(attention, "exp_polynomial", absolute_chebyshev)
    with pytest.raises(AssertionError):
        safe(attention.exp_polynomial(7.0, 8), 7.0)


def test_fault_odd_degree():
    for degree in (3, 5, 7):
        with pytest.raises(AssertionError):
            safe(exp_polynomial(1.0, degree), 1.0)


@pytest.mark.parametrize(("inputs", "d"), [(shifted, 4), (tiny_shifted, 4)])
def test_fault_missing_query_weights_after_centring(inputs, d, monkeypatch):
    monkeypatch.setattr(attention, "query_shift_weights", lambda keys, shift: keys.new_ones(len(keys)))
    with pytest.raises(AssertionError):
        fast_and_accurate(inputs, d)


def test_fault_certificate_computed_from_the_factors_it_certifies(monkeypatch):
    """Five pivots are too few. The honest certificate sends the call to exact attention; the other one is fooled."""
    choose = attention.choose_pivots
    monkeypatch.setattr(attention, "choose_pivots", lambda sample, rank: choose(sample, rank)[:5])
    generator = torch.Generator().manual_seed(0)
    q, k = uniform(2048, 4, generator)
    v = values(2048, 4, generator)
    output, certificate = almost_linear_attention(q, k, v, 1.0, return_certificate=True)
    assert certificate.method == "exact"
    assert error(output, q, k, v) <= 1e-3

    def by_the_factors(head, rows):
        factors = factorise(head.centred, 64, torch.Generator().manual_seed(0))
        return attention.Tests(rows, low_rank_attention(factors, key_moments(factors, head.v))[rows])

    monkeypatch.setattr(attention.Head, "test", by_the_factors)
    with pytest.raises(AssertionError):
        fast_and_accurate(uniform, 4)


# --- bad input --------------------------------------------------------------------------------------------------


def good():
    return {"q": torch.randn(6, 4), "k": torch.randn(5, 4), "v": torch.randn(5, 3)}


@pytest.mark.parametrize("function", [softmax_attention, almost_linear_attention])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_values_that_are_not_finite_are_refused(function, name):
    for bad in (math.nan, math.inf, -math.inf):
        inputs = good()
        inputs[name][1, 1] = bad
        with pytest.raises(ValueError, match=f"^{name} must be finite"):
            function(**inputs)


def test_large_finite_values_are_not_taken_for_infinite():
    inputs = {name: torch.full_like(t, 3e38) if name == "v" else t for name, t in good().items()}
    assert almost_linear_attention(**inputs).isfinite().all()


@pytest.mark.parametrize("function", [softmax_attention, almost_linear_attention])
def test_shapes_that_do_not_fit_are_refused(function):
    fits = good()
    for name, wrong in (
        ("k", torch.randn(5, 3)),
        ("v", torch.randn(4, 3)),
        ("q", torch.randn(2, 6, 4)),
        ("q", torch.randn(6)),
        ("q", torch.randint(5, (6, 4))),
        ("v", [[1.0]]),
    ):
        with pytest.raises(TypeCheckError, match=name):
            function(**fits | {name: wrong})
    for name, empty in (("q", torch.randn(0, 4)), ("v", torch.randn(5, 0))):
        with pytest.raises(ValueError, match=f"^{name} must not be empty"):
            function(**fits | {name: empty})
    with pytest.raises(ValueError, match="^k must not be empty"):
        function(fits["q"], torch.randn(0, 4), torch.randn(0, 3))
    with pytest.raises(ValueError, match="^k must have dtype torch.float32 like q, got torch.float64"):
        function(**fits | {"k": fits["k"].double()})
    with pytest.raises(ValueError, match="^scale must be finite"):
        function(**fits, scale=math.nan)


def test_arguments_that_cannot_be_honoured_are_refused():
    fits = good()
    for tolerance in (0.0, -1e-3, math.nan, math.inf):
        with pytest.raises(ValueError, match="^tolerance must be positive"):
            almost_linear_attention(**fits, tolerance=tolerance)
    for refused in ({"attn_mask": torch.ones(6, 5, dtype=torch.bool)}, {"dropout_p": 0.1}, {"is_causal": True}):
        with pytest.raises(ValueError, match="every query attends to every key"):
            almost_linear_attention(**fits, **refused)
    with pytest.raises(ValueError, match="float32 or float64"):
        almost_linear_attention(**{name: t.half() for name, t in fits.items()})
    with pytest.raises(ValueError, match="must not require a gradient"):
        almost_linear_attention(**fits | {"q": fits["q"].requires_grad_()})
    with torch.no_grad():
        almost_linear_attention(**fits)
    with pytest.raises(ValueError, match="^rank must be at least 1"):
        exp_factors(fits["q"].detach(), fits["k"], 0)
