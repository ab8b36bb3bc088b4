"""ditbook.gradient against autograd, against sums written out token by token, and against its own tolerance."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch.utils._python_dispatch import TorchDispatchMode

from ditbook import gradient
from ditbook.gradient import (
    almost_linear_gradient,
    attention_gradients,
    attention_weights,
    contract,
    dit_gradient,
    dit_loss,
    exact_gradients,
    logits_gradient,
    residual,
    rowwise_kronecker,
    trainable_attention,
    values,
    weights_gradient,
)

CHAPTER = "4-1-gradient"
LAWS = ("uniform", "shifted", "clustered")


def problem(L1, L2, d, seed=0, dtype=torch.float64):
    """W, A1, A2, A3, W_OV, Y of a small layer, all entries uniform in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((d, d), (L1, d), (L2, d), (L2, d), (d, d), (L1, d))
    return [2 * torch.rand(shape, generator=generator, dtype=dtype) - 1 for shape in shapes]


def law(kind, L1, L2=None, d=4, seed=0, size=0.7, dtype=torch.float64):
    """A layer with W = W_OV = I; targets are drawn at random, so the terms of the gradient largely cancel."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (L1, L2 or L1, L2 or L1, L1)
    A1, A2, A3, Y = (2 * torch.rand(L, d, generator=generator, dtype=torch.float64) - 1 for L in lengths)
    A1, A2 = size * A1, size * A2
    if kind == "shifted":
        A1, A2 = A1 + 2, A2 + 2
    if kind == "clustered":
        centres = size * torch.randn(8, d, generator=generator, dtype=torch.float64)
        A1, A2 = (centres[torch.randint(8, (len(A),), generator=generator)] + 0.1 * A for A in (A1, A2))
    return [x.to(dtype) for x in (torch.eye(d), A1, A2, A3, torch.eye(d), Y)]


def autograd_gradient(W, A1, A2, A3, W_OV, Y, scale=1.0):
    W = W.clone().requires_grad_()
    return torch.autograd.grad(plain_loss(W, A1, A2, A3, W_OV, Y, scale), W)[0]


def plain_loss(W, A1, A2, A3, W_OV, Y, scale=1.0):
    """Definition 4.1 by explicit exponentials."""
    u = torch.exp(scale * A1 @ W @ A2.mT)
    return ((u / u.sum(1, keepdim=True)) @ A3 @ W_OV.mT - Y).square().sum() / 2


def gap(approximate, exact):
    return float((approximate - exact).abs().max() / exact.abs().max())


class Watch(TorchDispatchMode):
    """The size of the largest array that torch makes inside."""

    largest = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else (result,)
        self.largest = max([self.largest] + [x.numel() for x in tensors if isinstance(x, torch.Tensor)])
        return result


# --- the loss and its exact gradient ----------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    L1=st.integers(1, 9),
    L2=st.integers(1, 9),
    d=st.integers(1, 5),
    scale=st.sampled_from([1, 0.3, 2.0]),
    seed=st.integers(0, 99),
)
def test_loss_and_gradient_agree_with_autograd(L1, L2, d, scale, seed):
    inputs = problem(L1, L2, d, seed)
    assert torch.allclose(dit_loss(*inputs, scale=scale), plain_loss(*inputs, scale=scale), rtol=1e-13)
    exact = autograd_gradient(*inputs, scale=scale)
    assert (dit_gradient(*inputs, scale=scale) - exact).abs().max() <= 1e-12 * exact.abs().max() + 1e-13


def test_the_loss_is_differentiable_in_every_argument():
    inputs = [x.requires_grad_() for x in problem(5, 7, 3)]
    for ours, plain in zip(
        torch.autograd.grad(dit_loss(*inputs), inputs), torch.autograd.grad(plain_loss(*inputs), inputs), strict=True
    ):
        assert gap(ours, plain) < 1e-12


def test_gradient_is_the_sum_over_tokens_of_lemma_G1():
    W, A1, A2, A3, W_OV, Y = inputs = problem(6, 8, 3)
    f, h = attention_weights(A1 @ W, A2), values(A3, W_OV)
    c = residual(f @ h, Y)
    total = torch.zeros(9, dtype=torch.float64)
    for j in range(6):
        A_j = torch.kron(A1[j : j + 1], A2)
        for i in range(3):
            total += c[j, i] * A_j.mT @ (torch.diag(f[j]) - torch.outer(f[j], f[j])) @ h[:, i]
    assert gap(dit_gradient(*inputs), total.reshape(3, 3)) < 1e-12


def test_gradient_does_not_depend_on_the_blocks_of_queries(monkeypatch):
    inputs = problem(50, 30, 3)
    whole = dit_gradient(*inputs)
    monkeypatch.setattr(gradient, "BLOCK_ENTRIES", 7 * 30)
    assert gap(dit_gradient(*inputs), whole) < 1e-13


def test_rows_of_p_sum_to_zero():
    f = torch.softmax(torch.randn(7, 9, dtype=torch.float64), dim=1)
    assert logits_gradient(f, torch.randn(7, 9, dtype=torch.float64)).sum(1).abs().max() < 1e-15


def test_entrywise_products_of_low_rank_matrices_factor_by_rowwise_kronecker_products():
    U1, U2, V1, V2 = (torch.randn(5, k, dtype=torch.float64) for k in (2, 3, 2, 3))
    product = rowwise_kronecker(U1, U2) @ rowwise_kronecker(V1, V2).mT
    assert torch.allclose(product, (U1 @ V1.mT) * (U2 @ V2.mT), atol=1e-14)


def test_p_1_is_applied_without_being_formed():
    f, c, h, X = (torch.randn(shape, dtype=torch.float64) for shape in ((6, 8), (6, 3), (8, 3), (8, 2)))
    assert torch.allclose(contract(c, f @ rowwise_kronecker(h, X)), (f * weights_gradient(c, h)) @ X, atol=1e-13)


# --- the fast gradient ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAWS)
def test_fast_gradient_is_within_tolerance_and_fast(kind):
    for seed in range(5):
        inputs = law(kind, 2048, seed=seed, dtype=torch.float32)
        found, certificate = almost_linear_gradient(*inputs, return_certificate=True)
        assert certificate.method == "low-rank"
        assert found.dtype == certificate.dtype == torch.float32
        assert gap(found.double(), dit_gradient(*(x.double() for x in inputs))) <= 1e-2


@pytest.mark.parametrize("kind", LAWS)
def test_six_digits_are_reached_in_double_precision(kind):
    inputs = law(kind, 3000, d=3, seed=1)
    found, certificate = almost_linear_gradient(*inputs, tolerance=1e-6, return_certificate=True)
    assert certificate.method == "low-rank"
    assert gap(found, dit_gradient(*inputs)) <= 1e-6


def test_self_attention_with_values_from_the_same_tokens():
    W, A1, _, _, W_OV, Y = law("uniform", 2048, seed=3)
    inputs = (W, A1, A1, A1, W_OV, Y)
    found, certificate = almost_linear_gradient(*inputs, return_certificate=True)
    assert certificate.method == "low-rank"
    assert gap(found, dit_gradient(*inputs)) <= 1e-2


@pytest.mark.parametrize(("L1", "L2"), [(1500, 3000), (3000, 1500)])
def test_cross_attention_with_unequal_lengths(L1, L2):
    inputs = law("uniform", L1, L2, d=3, seed=2)
    found, certificate = almost_linear_gradient(*inputs, scale=0.5, tolerance=1e-3, return_certificate=True)
    assert certificate.method == "low-rank"
    assert gap(found, dit_gradient(*inputs, scale=0.5)) <= 1e-3


def test_a_tolerance_that_float32_cannot_hold_is_met_in_float64():
    inputs = law("uniform", 2048, d=2, dtype=torch.float32)
    found, certificate = almost_linear_gradient(*inputs, tolerance=1e-6, return_certificate=True)
    assert (found.dtype, certificate.dtype) == (torch.float32, torch.float64)
    assert gap(found.double(), dit_gradient(*(x.double() for x in inputs))) <= 1e-6


def test_a_tolerance_below_the_rounding_of_the_answer_is_refused():
    with pytest.raises(ValueError, match="tolerance must be at least 1.2e-07, the rounding of torch.float32"):
        almost_linear_gradient(*problem(4, 4, 2, dtype=torch.float32), tolerance=1e-8)


def test_large_logits_are_answered_exactly_and_the_certificate_says_so():
    inputs = law("uniform", 2048)
    inputs[0] = 40 * inputs[0]
    found, certificate = almost_linear_gradient(*inputs, return_certificate=True)
    assert (certificate.method, certificate.rank, certificate.sampled_error) == ("exact", None, 0.0)
    assert "no rank" in certificate.reason
    assert gap(found, dit_gradient(*inputs)) < 1e-12


def test_few_tokens_are_answered_exactly():
    inputs = problem(20, 30, 3)
    found, certificate = almost_linear_gradient(*inputs, return_certificate=True)
    assert certificate.reason == "too few tokens for a gain"
    assert gap(found, autograd_gradient(*inputs)) < 1e-12


def test_a_vanishing_gradient_is_answered_exactly():
    W, A1, A2, A3, W_OV, Y = law("uniform", 2048)
    found, certificate = almost_linear_gradient(W, A1, torch.ones_like(A2), A3, W_OV, Y, return_certificate=True)
    assert certificate.method == "exact"
    assert found.abs().max() < 1e-10


def test_sampled_error_is_an_estimate_and_the_bounds_are_bounds():
    for seed, kind in enumerate(LAWS):
        inputs = law(kind, 2048, d=3, seed=seed)
        found, certificate = almost_linear_gradient(*inputs, tolerance=1e-3, return_certificate=True)
        error = gap(found, dit_gradient(*inputs))
        assert error <= 3 * certificate.sampled_error <= 1e-3
        assert error <= certificate.confidence_bound
        assert error <= certificate.error_bound


def test_the_worst_case_is_of_use_at_high_ranks():
    inputs = law("uniform", 2048, d=2, size=0.5)
    _, certificate = almost_linear_gradient(*inputs, tolerance=1e-8, return_certificate=True)
    assert certificate.error_bound < 1e-3


def test_no_array_of_L1_times_L2_entries_is_made():
    inputs = law("uniform", 8192, d=2, dtype=torch.float32)
    with Watch() as watch:
        almost_linear_gradient(*inputs)
    assert watch.largest <= 8192**2 / 100


def test_the_same_seed_gives_the_same_gradient_and_the_global_generator_is_left_alone():
    inputs = law("uniform", 2048, d=2)
    before = torch.random.get_rng_state()
    first, second = (almost_linear_gradient(*inputs, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.random.get_rng_state())


def test_wrong_factors_do_not_pass_the_certificate(monkeypatch):
    """Exact rows share no step with the factors: a wrong sum is found out and the exact gradient is given."""
    inputs = law("uniform", 2048, d=3)
    monkeypatch.setattr(gradient, "through_p", lambda c, f_h, f_keys, f_kron: contract(c, f_kron))
    found, certificate = almost_linear_gradient(*inputs, return_certificate=True)
    assert certificate.method == "exact"
    assert gap(found, dit_gradient(*inputs)) < 1e-12


# --- attention that can be trained ------------------------------------------------------------------------------


def leaves(*shapes, size=0.7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [(size * (2 * torch.rand(s, generator=generator, dtype=dtype) - 1)).requires_grad_() for s in shapes]


def test_trained_attention_has_the_gradients_of_exact_attention(monkeypatch):
    q, k, v = leaves((2, 4096, 3), (2, 3500, 3), (2, 3500, 2))
    c = torch.randn(2, 4096, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    monkeypatch.setattr(gradient, "exact_gradients", only_some_queries(gradient.exact_gradients, 300))
    output = trainable_attention(q, k, v, tolerance=1e-4)
    fast = torch.autograd.grad((c * output).sum(), (q, k, v))
    exact = [
        torch.stack(g) for g in zip(*(exact_gradients(*x, 3**-0.5) for x in zip(q, k, v, c, strict=True)), strict=True)
    ]
    for ours, theirs in zip(fast, exact, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def only_some_queries(function, most):
    """The function, refusing more queries than a certificate needs: the fast path must have been taken."""

    def guarded(q, *others):
        assert len(q) <= most
        return function(q, *others)

    return guarded


def test_gradcheck_passes_at_a_tight_tolerance(monkeypatch):
    """On so few tokens nothing would be gained: let the backward pass use 32 features nevertheless."""
    monkeypatch.setattr(gradient, "FIRST_RANK", 32)
    monkeypatch.setattr(gradient, "SAMPLES", 16)
    monkeypatch.setattr(gradient, "largest_rank", lambda layer, samples: 4 * 32)
    monkeypatch.setattr(gradient, "exact_gradients", only_some_queries(gradient.exact_gradients, 16))
    attend = partial(trainable_attention, scale=1.0, tolerance=1e-6)
    assert torch.autograd.gradcheck(attend, leaves((18, 2), (20, 2), (20, 2), size=0.5), rtol=1e-6, atol=1e-7)


def test_wrong_key_gradients_do_not_pass(monkeypatch):
    q, k, v = (x.detach() for x in leaves((4096, 3), (4096, 3), (4096, 3)))
    c = torch.randn(4096, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    right = gradient.key_gradients
    monkeypatch.setattr(gradient, "key_gradients", lambda *x: (1.01 * right(*x)[0], right(*x)[1]))
    for ours, theirs in zip(
        attention_gradients(q, k, v, c, 1.0, 1e-3, torch.Generator().manual_seed(0)),
        exact_gradients(q, k, v, c, 1.0),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_a_layer_that_the_loss_ignores_gets_zero_gradients():
    q, k, v = leaves((4096, 2), (4096, 2), (4096, 2))
    grads = torch.autograd.grad((0 * trainable_attention(q, k, v)).sum(), (q, k, v))
    assert all(not g.any() for g in grads)


def test_gradients_cannot_be_differentiated_again():
    q, k, v = leaves((5, 2), (5, 2), (5, 2))
    (g,) = torch.autograd.grad(trainable_attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [dit_loss, dit_gradient, almost_linear_gradient])
@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_entries_that_are_not_finite_are_refused(function, index, bad):
    inputs = problem(4, 5, 2)
    inputs[index][0, 0] = bad
    with pytest.raises(ValueError, match=f"{('W', 'A1', 'A2', 'A3', 'W_OV', 'Y')[index]} must be finite"):
        function(*inputs)


@pytest.mark.parametrize("function", [dit_loss, dit_gradient, almost_linear_gradient])
def test_a_scale_that_is_not_finite_is_refused(function):
    with pytest.raises(ValueError, match="scale must be finite, got nan"):
        function(*problem(4, 4, 2), scale=math.nan)


@pytest.mark.parametrize("tolerance", [0, -1e-3, math.nan, math.inf])
def test_a_tolerance_that_is_not_positive_and_finite_is_refused(tolerance):
    with pytest.raises(ValueError, match="tolerance must be positive"):
        almost_linear_gradient(*problem(4, 4, 2), tolerance=tolerance)


@pytest.mark.parametrize("function", [dit_loss, dit_gradient, almost_linear_gradient])
def test_no_tokens_and_mixed_dtypes_are_refused(function):
    with pytest.raises(ValueError, match=r"A1 must not be empty, got shape \(0, 2\)"):
        function(*problem(0, 5, 2))
    with pytest.raises(ValueError, match="A2 must not be empty"):
        function(*problem(5, 0, 2))
    inputs = problem(4, 5, 2)
    inputs[2] = inputs[2].float()
    with pytest.raises(ValueError, match=r"A2 must have dtype torch.float64 like W, got torch.float32"):
        function(*inputs)
    with pytest.raises(ValueError, match=r"W must be float32 or float64, got torch.float16"):
        function(*(x.half() for x in problem(4, 5, 2)))


@pytest.mark.parametrize("function", [dit_loss, dit_gradient, almost_linear_gradient])
def test_shapes_that_do_not_fit_and_integers_are_refused(function):
    W, A1, A2, A3, W_OV, Y = problem(4, 5, 2)
    with pytest.raises(TypeCheckError, match="A3"):
        function(W, A1, A2, A3[:4], W_OV, Y)
    with pytest.raises(TypeCheckError, match="Y"):
        function(W, A1, A2, A3, W_OV, Y[:3])
    with pytest.raises(TypeCheckError, match="W"):
        function(W[:1], A1, A2, A3, W_OV, Y)
    with pytest.raises(TypeCheckError, match="A1"):
        function(W, A1.long(), A2, A3, W_OV, Y)


def test_trainable_attention_refuses_what_attention_refuses():
    q, k, v = leaves((4, 2), (5, 2), (5, 2))
    with pytest.raises(ValueError, match="tolerance"):
        trainable_attention(q, k, v, tolerance=-1.0)
    with pytest.raises(ValueError, match="k must be finite"):
        trainable_attention(q, k * math.nan, v)
    with pytest.raises(TypeCheckError, match="k"):
        trainable_attention(q, k[:, :1], v)


# --- planted faults: the chapter's own checks refuse them -------------------------------------------------------


def printed_p_2(f, q):
    """f diag(r): the misprint of Lemma G.7."""
    return f * (f * q).sum(dim=-1)[None, :]


FAULTS = {
    "p_2 = f diag(r)": ("step-S3", {"ditbook.gradient.p_2": printed_p_2}),
    "missing minus sign": (
        "lemma-G.2",
        {"ditbook.gradient.logits_gradient": lambda f, q: gradient.p_1(f, q) + gradient.p_2(f, q)},
    ),
    "c without Y": ("lemma-G.2", {"ditbook.gradient.residual": lambda output, Y: output}),
    "transposed q": ("step-S3", {"ditbook.gradient.weights_gradient": lambda c, h: h @ c.mT}),
    "softmax over the queries": (
        "remark-4.1",
        {"ditbook.gradient.attention_weights": lambda queries, keys: torch.softmax(queries @ keys.mT, dim=0)},
    ),
    "values without W_OV": ("definition-G.4", {"ditbook.gradient.values": lambda A3, W_OV: A3}),
    "fast: p_2 with one r for all queries": (
        "lemma-G.7",
        {
            "ditbook.gradient.through_p": lambda c, f_h, f_keys, f_kron: (
                contract(c, f_kron) - f_keys * (c * f_h).sum(-1).mean()
            )
        },
    ),
    "fast: missing minus sign": (
        "lemma-G.7",
        {
            "ditbook.gradient.through_p": lambda c, f_h, f_keys, f_kron: (
                contract(c, f_kron) + (c * f_h).sum(-1, keepdim=True) * f_keys
            )
        },
    ),
    "fast: transposed Kronecker product": (
        "lemma-G.6",
        {
            "ditbook.gradient.contract": lambda c, f_kron: torch.einsum(
                "jb,jlb->jl", c, f_kron.unflatten(-1, (c.shape[-1], -1))
            )
        },
    ),
    "fast: no certificate": (
        "theorem-4.1",
        {"ditbook.gradient.Search.sampled_error": lambda *_: 0.0, "ditbook.gradient.FIRST_RANK": 8},
    ),
    "worst case without the sum over tokens": (
        "problem-1",
        {"ditbook.gradient.worst_case": lambda f, A1, layer, size: 1e-18},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_chapter_rejects(rejects, name):
    claim, faults = FAULTS[name]
    rejects(CHAPTER, claim, faults)
