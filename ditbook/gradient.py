"""The gradient of Section 4.1 and Appendix G: exact in the paper's pieces, and almost linear in the sequence length.

Tokens are rows. Rows of A1 are queries, rows of A2 and A3 belong to keys and values; the paper writes the same
matrices transposed and calls f, h, c, q what is called attention_weights, values, residual, weights_gradient here.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Generator, Tensor
from torch.autograd.function import once_differentiable

from ditbook.attention import Factors, almost_linear_attention, exp_factors, residual_bound, softmax_attention
from ditbook.inputs import require_inputs, require_precision, require_tolerance, typed

# Exact attention weights are formed for so many queries at a time that they have at most this many entries.
BLOCK_ENTRIES = 2**18

# ---------------------------------------------------------------------------------------------------------------
# The loss, and its gradient in the pieces of Appendix G


@typed
def dit_loss(
    W: Float[Tensor, "d d"],
    A1: Float[Tensor, "L1 d"],
    A2: Float[Tensor, "L2 d"],
    A3: Float[Tensor, "L2 d"],
    W_OV: Float[Tensor, "d d"],
    Y: Float[Tensor, "L1 d"],
    scale: float | int = 1.0,
) -> Float[Tensor, ""]:
    """1/2 sum (softmax(scale A1 W A2') A3 W_OV' - Y)^2, each query's weights summing to one over the keys.

    The decoder of the paper's loss has orthonormal columns and drops out (erratum 32). Differentiable.

    Source: Definition 4.1, Equation 4.4

    :param W: query and key weights in one, W_Q' W_K, ``(d, d)``.
    :param A1: inputs of the queries, ``(L1, d)``; equal to ``A2`` in self-attention.
    :param A2: inputs of the keys, ``(L2, d)``.
    :param A3: inputs of the values, ``(L2, d)``.
    :param W_OV: value and output weights in one, W_O W_V, ``(d, d)``.
    :param Y: target tokens, ``(L1, d)``.
    :param scale: multiplies the logits; the paper's 1, not 1/sqrt(d).
    :raises ValueError: no tokens, mixed dtypes, an entry or a scale that is not finite.
    """
    require_inputs(scale, W=W, A1=A1, A2=A2, A3=A3, W_OV=W_OV, Y=Y)
    require_precision("W", W)
    output = softmax_attention(A1 @ W, A2, values(A3, W_OV), scale=scale)
    return residual(output, Y).square().sum() / 2


@typed
def dit_gradient(
    W: Float[Tensor, "d d"],
    A1: Float[Tensor, "L1 d"],
    A2: Float[Tensor, "L2 d"],
    A3: Float[Tensor, "L2 d"],
    W_OV: Float[Tensor, "d d"],
    Y: Float[Tensor, "L1 d"],
    scale: float | int = 1.0,
) -> Float[Tensor, "d d"]:
    """The gradient of :func:`dit_loss` in W, scale A1' p A2: exact, in O(L1 L2 d) operations and linear memory.

    Source: Lemma G.2

    :param W: this and the others as in :func:`dit_loss`.
    :raises ValueError: no tokens, mixed dtypes, an entry or a scale that is not finite.
    """
    require_inputs(scale, W=W, A1=A1, A2=A2, A3=A3, W_OV=W_OV, Y=Y)
    require_precision("W", W)
    layer = Layer(scale * A1 @ W, A2, values(A3, W_OV), Y)
    return scale * A1.mT @ exact_rows(layer)


def attention_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """f, ``(L1, L2)``: each query's probability vector over the keys.

    Source: Definition G.1, Definition G.2, Definition G.3
    """
    return torch.softmax(queries @ keys.mT, dim=-1)


def values(A3: Tensor, W_OV: Tensor) -> Tensor:
    """h, ``(L2, d)``.

    Source: Definition G.4
    """
    return A3 @ W_OV.mT


def residual(output: Tensor, Y: Tensor) -> Tensor:
    """c = f h - Y, ``(L1, d)``: attention output minus target.

    Source: Definition G.5
    """
    return output - Y


def weights_gradient(c: Tensor, h: Tensor) -> Tensor:
    """q = c h', ``(L1, L2)``: the derivative of the loss in the attention weights.

    Source: Definition G.6
    """
    return c @ h.mT


def p_1(f: Tensor, q: Tensor) -> Tensor:
    """The entrywise product of f and q.

    Source: Definition G.7
    """
    return f * q


def p_2(f: Tensor, q: Tensor) -> Tensor:
    """diag(r) f with r_j = <f_j, q_j>: every query's row is scaled by its own number.

    Source: Definition G.7
    """
    return (f * q).sum(dim=-1, keepdim=True) * f


def logits_gradient(f: Tensor, q: Tensor) -> Tensor:
    """p = p_1 - p_2, ``(L1, L2)``: the derivative of the loss in the logits.

    Source: Definition G.7
    """
    return p_1(f, q) - p_2(f, q)


@dataclass(frozen=True)
class Layer:
    """What p depends on: queries ``scale A1 W``, keys A2, values h, targets Y."""

    queries: Tensor
    keys: Tensor
    h: Tensor
    Y: Tensor

    def part(self, queries: Tensor | slice, keys: Tensor | slice = slice(None)) -> "Layer":
        """The layer of some of the queries and some of the keys."""
        return Layer(self.queries[queries], self.keys[keys], self.h[keys], self.Y[queries])

    def centred(self) -> "Layer":
        """The same p and c from keys and values of mean zero: rows of f sum to one, rows of p to zero."""
        mean = self.h.mean(dim=0)
        return Layer(self.queries, self.keys - self.keys.mean(dim=0), self.h - mean, self.Y - mean)


def exact_rows(layer: Layer) -> Tensor:
    """p A2, ``(L1, d)``. A row of p belongs to one query, so f is formed for a block of queries at a time."""
    rows = torch.empty_like(layer.queries)
    for block in blocks(len(rows), max(1, BLOCK_ENTRIES // len(layer.keys))):
        f = attention_weights(layer.queries[block], layer.keys)
        c = residual(f @ layer.h, layer.Y[block])
        rows[block] = logits_gradient(f, weights_gradient(c, layer.h)) @ layer.keys
    return rows


def blocks(length: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most ``size`` that cover ``length``."""
    return (slice(start, start + size) for start in range(0, length, size))


# ---------------------------------------------------------------------------------------------------------------
# The same gradient without an L1 x L2 array

# Tokens whose features are held at a time: few enough for them to stay in the cache.
BLOCK_TOKENS = 512


def factored_rows(f: Factors, layer: Layer) -> Tensor:
    """p A2, ``(L1, d)``, with f in factored form."""
    rows = torch.empty_like(layer.queries)
    for block, sums in kernel_sums(f, lambda keys: key_columns(layer.h[keys], layer.keys[keys])):
        # The column of ones gives the row sums D.
        f_h, f_keys, f_kron = split_columns(sums[:, 1:] / sums[:, :1], layer.h)
        rows[block] = through_p(residual(f_h, layer.Y[block]), f_h, f_keys, f_kron)
    return rows


def through_p(c: Tensor, f_h: Tensor, f_keys: Tensor, f_kron: Tensor) -> Tensor:
    """p A2 = p_1 A2 - p_2 A2 from c and from what f makes of h, of A2 and of their row-wise Kronecker product.

    Source: Lemma G.6, Lemma G.7
    """
    # p_2 = diag(r) f with r_j = <f_j, q_j> = <c_j, (f h)_j>.
    r = (c * f_h).sum(dim=-1, keepdim=True)
    return contract(c, f_kron) - r * f_keys


def contract(c: Tensor, f_kron: Tensor) -> Tensor:
    """(f ⊙ (c h')) X from f (h ⊗ X): with l over the columns of c and h, p_1 = sum_l diag(c_l) f diag(h_l).

    Source: Lemma G.6
    """
    return torch.einsum("jl,jlb->jb", c, f_kron.unflatten(-1, (c.shape[-1], -1)))


def rowwise_kronecker(A: Tensor, B: Tensor) -> Tensor:
    """All products of an entry of A with an entry of B in the same row, ``(L, a b)``.

    Source: Lemma G.6
    """
    return (A[:, :, None] * B[:, None, :]).flatten(-2)


def key_columns(h: Tensor, keys: Tensor) -> Tensor:
    """1, h, A2 and h ⊗ A2 side by side: all that the queries have to learn about the keys."""
    return torch.cat([torch.ones_like(h[:, :1]), h, keys, rowwise_kronecker(h, keys)], dim=-1)


def split_columns(columns: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of :func:`key_columns` after the ones."""
    m = h.shape[-1]
    d = (columns.shape[-1] - m) // (m + 1)
    return columns.split([m, d, m * d], dim=-1)


def kernel_sums(
    f: Factors, columns: Callable[[slice], Tensor], transpose: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    """D f X, or its transpose (D f)' X, a block of rows at a time. X is asked for in blocks as well.

    :param columns: the rows of X that belong to a slice of the keys, or of the queries for the transpose.
    """
    sides = [(f.queries, torch.ones_like(f.queries[:, :1])), (f.keys, f.weights[:, None])]
    (targets, target_weights), (sources, source_weights) = sides[::-1] if transpose else sides
    moments = torch.zeros((), dtype=torch.float64, device=f.keys.device)
    for block in blocks(len(sources), BLOCK_TOKENS):
        moments = moments + (f.features(sources[block]).mT @ (source_weights[block] * columns(block))).double()
    moments = f.solve(moments).to(f.keys.dtype)
    for block in blocks(len(targets), BLOCK_TOKENS):
        yield block, target_weights[block] * (f.features(targets[block]) @ moments)


# ---------------------------------------------------------------------------------------------------------------
# Finding the rank, and how wrong the answer is

# Random queries whose exact rows certify the gradient.
SAMPLES = 256
# The sampled error is accepted below the tolerance over this.
SAFETY = 3
# Keys of the small problem on which ranks are tried, and the first rank.
TRIAL_KEYS, FIRST_RANK = 1024, 64
# Relative costs: an entry of the exact weights; a feature of a token, and times a column; factors, per squared rank.
PAIR, FEATURE, COLUMN, FACTORISE = 14.0, 2.3, 0.035, 250.0
# The low-rank method is tried up to the rank at which it is expected to cost this share of the exact one.
WORTHWHILE = 0.5
# Tolerances below this one are worked out in float64, whatever the dtype of the input.
FLOAT32_TOLERANCE = 1e-3


@dataclass(frozen=True)
class GradientCertificate:
    """How :func:`almost_linear_gradient` found its answer. Errors are largest errors over the largest gradient entry.

    ``sampled_error`` is an estimate, accepted below a third of the tolerance: from the change of the gradient since
    a smaller rank, and the factor by which exact rows at random queries say that errors have shrunk since then.
    ``confidence_bound`` uses these rows only: with 99% confidence over the sample no entry errs more. Where the terms
    of the gradient cancel it is far too large, by up to the square root of queries over samples.

    :param method: ``"low-rank"`` or ``"exact"``, for which all errors are 0.
    :param rank: number of features; None for the exact method.
    :param dtype: of the work; float64 also for float32 input when the tolerance asks for it.
    :param reason: why the method is exact; empty for the low-rank one.
    """

    method: str
    rank: int | None
    sampled_error: float
    confidence_bound: float
    dtype: torch.dtype
    reason: str = ""
    bound: Callable[[], float | None] = field(default=lambda: 0.0, repr=False, compare=False)

    @cached_property
    def error_bound(self) -> float | None:
        """A bound without chance, see :func:`worst_case`; None where there is none. Computed when first read."""
        return self.bound()


@typed
@torch.no_grad()
def almost_linear_gradient(
    W: Float[Tensor, "d d"],
    A1: Float[Tensor, "L1 d"],
    A2: Float[Tensor, "L2 d"],
    A3: Float[Tensor, "L2 d"],
    W_OV: Float[Tensor, "d d"],
    Y: Float[Tensor, "L1 d"],
    scale: float | int = 1.0,
    tolerance: float | int = 1e-2,
    return_certificate: bool = False,
    generator: Generator | None = None,
) -> Float[Tensor, "d d"] | tuple[Float[Tensor, "d d"], GradientCertificate]:
    """The gradient of :func:`dit_loss` in W within ``tolerance``, in linear time and memory where possible.

    The attention weights are replaced by factors of rank r from :func:`~ditbook.attention.exp_factors`. The rank is
    chosen on a small part of the problem, and the answer is compared with exact rows at random queries. Where no rank
    that saves half of the work meets the tolerance, the gradient is computed exactly, and the certificate says so.

    Near a minimum of the loss the gradient vanishes while its terms do not: a tolerance relative to the gradient is
    then met by exact computation only.

    Source: Theorem 4.1

    :param W: this and the others as in :func:`dit_loss`; float32 or float64, as is the result.
    :param tolerance: largest error over the largest entry of the gradient, in absolute values.
    :param return_certificate: also return a :class:`GradientCertificate`.
    :param generator: source of the samples; None is a fresh one with a fixed seed.
    :raises ValueError: as :func:`dit_loss`; a tolerance that is not positive, or below the rounding of the dtype.
    """
    inputs = {"W": W, "A1": A1, "A2": A2, "A3": A3, "W_OV": W_OV, "Y": Y}
    require_inputs(scale, **inputs)
    require_precision("W", W)
    rounding = torch.finfo(W.dtype).eps
    if require_tolerance(tolerance) < rounding:
        raise ValueError(f"tolerance must be at least {rounding:.1e}, the rounding of {W.dtype}, got {tolerance}")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    if tolerance < FLOAT32_TOLERANCE:
        inputs = {name: value.double() for name, value in inputs.items()}
    gradient, certificate = certified_gradient(**inputs, scale=scale, tolerance=tolerance, generator=generator)
    gradient = gradient.to(W.dtype)
    return (gradient, certificate) if return_certificate else gradient


def certified_gradient(W, A1, A2, A3, W_OV, Y, scale, tolerance, generator) -> tuple[Tensor, GradientCertificate]:
    """The low-rank gradient at the first rank whose certificate allows it, or the exact one."""
    layer = Layer(scale * A1 @ W, A2, values(A3, W_OV), Y).centred()
    cap, reason = largest_rank(layer, SAMPLES), "too few tokens for a gain"
    if cap >= FIRST_RANK:
        reason = "no rank that saves half of the work meets the tolerance"
        search = Search(
            A1, layer, random_rows(A1, SAMPLES, generator), random_rows(A2, TRIAL_KEYS, generator), generator
        )
        f = search.factors(FIRST_RANK)
        attempt = search.attempt(f.truncate(FIRST_RANK // 2))
        while f is not None:
            attempt, before = search.attempt(f), attempt
            error = search.sampled_error(attempt, before)
            if error <= tolerance / SAFETY:
                return scale * attempt.gradient, search.certificate(attempt, error)
            f = search.enlarge(f, tolerance / SAFETY / error, cap)
    return scale * A1.mT @ exact_rows(layer), GradientCertificate("exact", None, 0.0, 0.0, W.dtype, reason)


def largest_rank(layer: Layer, samples: int) -> int:
    """The rank at which the low-rank method is expected to cost ``WORTHWHILE`` of the exact one; 0 if there is none."""
    L1, L2, d = len(layer.queries), len(layer.keys), layer.keys.shape[-1]
    linear = (L1 + L2) * (FEATURE + COLUMN * (1 + layer.h.shape[-1]) * (1 + d))
    spare = PAIR * L2 * (WORTHWHILE * L1 - samples)
    # The positive root of FACTORISE r^2 + linear r = spare.
    return int(2 * spare / (linear + math.sqrt(linear**2 + 4 * FACTORISE * spare))) if spare > 0 else 0


def random_rows(rows: Tensor, count: int, generator: Generator) -> Tensor:
    """Indices of ``count`` different rows, all of them if there are fewer."""
    return torch.randperm(len(rows), generator=generator, device=generator.device)[:count].to(rows.device)


@dataclass(frozen=True)
class Attempt:
    """The gradient (without the scale) by some factors, and the errors of p A2 at the sampled queries."""

    f: Factors
    gradient: Tensor
    errors: Tensor


@dataclass(frozen=True)
class Search:
    """The search for a rank: what is tried, and the exact rows of p A2 by which it is judged."""

    A1: Tensor
    layer: Layer
    sample: Tensor
    trial_keys: Tensor
    generator: Generator

    @cached_property
    def exact(self) -> Tensor:
        """Rows of p A2 at the sampled queries."""
        return exact_rows(self.layer.part(self.sample))

    @cached_property
    def trial(self) -> tuple[Layer, Tensor]:
        """The sampled queries over some of the keys, on which a rank costs little, and its exact rows."""
        layer = self.layer.part(self.sample, self.trial_keys)
        return layer, exact_rows(layer)

    def factors(self, rank: int) -> Factors:
        return exp_factors(self.layer.queries, self.layer.keys, rank, 1.0, self.generator)

    def attempt(self, f: Factors) -> Attempt:
        rows = factored_rows(f, self.layer)
        return Attempt(f, self.A1.mT @ rows, rows[self.sample] - self.exact)

    def total(self, errors: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the error of each entry of the gradient, extrapolated from the sample."""
        terms, L1 = rowwise_kronecker(self.A1[self.sample], errors), len(self.A1)
        return L1 * terms.mean(dim=0), L1 * terms.std(dim=0) * math.sqrt(1 / len(terms) - 1 / L1)

    def sampled_error(self, attempt: Attempt, before: Attempt) -> float:
        """See :class:`GradientCertificate`. Entries whose error stands out from the noise count as they are."""
        shrunk = attempt.errors.norm() / before.errors.norm()
        # With errors T and T', T = shrunk T', the gradients differ by at least (1 / shrunk - 1) T.
        carried = (attempt.gradient - before.gradient).abs().max() * shrunk / (1 - shrunk).clamp_min(0)
        mean, deviation = self.total(attempt.errors)
        outstanding = torch.where(mean.abs() > 4 * deviation, mean.abs(), 0.0).max()
        return float(torch.maximum(carried, outstanding) / attempt.gradient.abs().max())

    def certificate(self, attempt: Attempt, error: float) -> GradientCertificate:
        mean, deviation = self.total(attempt.errors)
        size = attempt.gradient.abs().max()
        # One entry is the worst: the probability that it exceeds its own bound is 1%.
        confidence = float((mean.abs() + 2.33 * deviation).max() / size)
        bound = partial(worst_case, attempt.f, self.A1, self.layer, size)
        return GradientCertificate("low-rank", attempt.f.rank, error, confidence, size.dtype, bound=bound)

    def trial_error(self, f: Factors) -> float:
        """Root mean square error of the rows of p A2 on the trial, over their root mean square."""
        layer, exact = self.trial
        part = replace(
            f, queries=f.queries[self.sample], keys=f.keys[self.trial_keys], weights=f.weights[self.trial_keys]
        )
        return float((factored_rows(part, layer) - exact).norm() / exact.norm())

    def enlarge(self, f: Factors, share: float, cap: int) -> Factors | None:
        """Factors with ``share`` of the error of f on the trial; None if that takes more than ``cap`` features."""
        half = f.truncate(f.rank // 2)
        ranks, errors = [half.rank, f.rank], [self.trial_error(half), self.trial_error(f)]
        target = share * errors[-1]
        while not errors[-1] <= target:
            # A power law through the last two errors; where it would lead far it is not trusted.
            fall = math.log(errors[-2] / errors[-1]) / math.log(ranks[-1] / ranks[-2]) if errors[-1] < errors[-2] else 0
            growth = (errors[-1] / target) ** (1 / max(0.5, fall)) if target > 0 else math.inf
            rank = math.ceil(f.rank * min(max(1.25, growth), 3.0))
            f = self.factors(rank) if rank <= cap else f
            if f.rank <= ranks[-1]:
                return None
            ranks.append(f.rank)
            errors.append(self.trial_error(f))
        return f


def worst_case(f: Factors, A1: Tensor, layer: Layer, size: Tensor) -> float | None:
    """A bound over ``size`` on the error of every entry of A1' p A2, up to rounding, or None where f has none.

    With eps the largest row sum of the absolute error of f, H = max abs h and a = max abs A2, row j of p A2 is off by
    at most eps H a (2 d H + (3 + eps) sum_l abs c_jl): f and c are changed one after the other in
    sum_k f_jk (c_j h_k) A2_k - (c_j (f h)_j) (f A2)_j. The sum over j takes the column sums of abs A1 (erratum 35).

    Source: Theorem 4.1, Book 5
    """
    epsilon = residual_bound(f)
    if epsilon is None:
        return None
    H, a = layer.h.abs().max(), layer.keys.abs().max()
    total = torch.zeros_like(A1[0])
    for block, sums in kernel_sums(f, lambda keys: key_columns(layer.h[keys], layer.keys[keys, :0])):
        c = residual(sums[:, 1:] / sums[:, :1], layer.Y[block])
        total += A1[block].abs().mT @ (2 * c.shape[-1] * H + (3 + epsilon) * c.abs().sum(dim=-1))
    return float(epsilon * H * a * total.max() / size)


# ---------------------------------------------------------------------------------------------------------------
# Attention that can be trained


@typed
def trainable_attention(
    q: Float[Tensor, "*batch L1 d"],
    k: Float[Tensor, "*batch L2 d"],
    v: Float[Tensor, "*batch L2 dv"],
    scale: float | int | None = None,
    tolerance: float | int = 1e-3,
    generator: Generator | None = None,
) -> Float[Tensor, "*batch L1 dv"]:
    """:func:`~ditbook.attention.almost_linear_attention` with gradients for q, k and v, almost linear as well.

    The backward pass has factors of its own. At random queries and keys its gradients are compared with exact ones:
    root mean square errors must stay below ``tolerance`` times the root mean squares, or the head's gradients are
    computed exactly.

    Source: Theorem 4.1, Proposition 4.2

    :param q: queries, ``(..., L1, d)``, as k and v float32 or float64.
    :param scale: factor of the logits; None means 1/sqrt(d).
    :param tolerance: of the output as in :func:`~ditbook.attention.almost_linear_attention`; of the gradients as above.
    :raises ValueError: as :func:`~ditbook.attention.almost_linear_attention`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    return AlmostLinearAttention.apply(q, k, v, scale, tolerance, generator)


class AlmostLinearAttention(torch.autograd.Function):
    """What :func:`trainable_attention` applies; second derivatives are refused."""

    @staticmethod
    def forward(ctx, q, k, v, scale, tolerance, generator):
        """:func:`~ditbook.attention.almost_linear_attention`."""
        output = almost_linear_attention(q, k, v, scale, tolerance, generator=generator)
        ctx.save_for_backward(q, k, v)
        # A copy: going backwards twice gives the same gradients.
        ctx.options = scale, tolerance, generator.clone_state()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, c):
        """:func:`attention_gradients`, head by head."""
        inputs, (scale, tolerance, generator) = ctx.saved_tensors, ctx.options
        options = scale, tolerance, generator.clone_state()
        heads = zip(*(x.reshape(-1, *x.shape[-2:]) for x in (*inputs, c)), strict=True)
        gradients = zip(*(attention_gradients(*head, *options) for head in heads), strict=True)
        return *(torch.stack(g).reshape(x.shape) for g, x in zip(gradients, inputs, strict=True)), None, None, None


def attention_gradients(q, k, v, c, scale, tolerance, generator) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of sum(c * attention) in q, k and v of one head: low-rank where that pays and is certified."""
    queries, keys = random_rows(q, SAMPLES, generator), random_rows(k, SAMPLES, generator)
    # Each rank costs two passes, and there may be some in vain.
    cap, rank = largest_rank(Layer(q, k, v, c), 2 * SAMPLES) // 4, FIRST_RANK
    exact = exact_gradients(q[queries], k, v, c[queries], scale)[0] if rank <= cap else None
    while rank <= cap:
        f = exp_factors(q, k, rank, scale, generator)
        dq, D, r = query_gradients(f, k, v, c, scale)
        if agree(dq[queries], exact, tolerance):
            dk, dv = key_gradients(f, q, v, c, scale, D, r)
            exact_dk, exact_dv = gradients_at_keys(f, keys, q, v, c, scale, D, r)
            if agree(dk[keys], exact_dk, tolerance) and agree(dv[keys], exact_dv, tolerance):
                return dq, dk, dv
        rank *= 2
    return exact_gradients(q, k, v, c, scale)


def agree(fast: Tensor, exact: Tensor, tolerance: float) -> bool:
    """Whether the root mean square error is at most ``tolerance`` times the root mean square; not for NaN."""
    return bool((fast - exact).square().sum() <= tolerance**2 * exact.square().sum())


def exact_gradients(q, k, v, c, scale) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of sum(c * attention) in q, k, v by automatic differentiation of exact attention."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(softmax_attention(*leaves, scale), leaves, c)


def query_gradients(f: Factors, k, v, c, scale) -> tuple[Tensor, Tensor, Tensor]:
    """scale p k with f in factored form, the row sums D, and r_j = <c_j, (f v)_j>."""
    dq, D, r = torch.empty_like(c[:, :1] * k[:1]), torch.empty_like(c[:, :1]), torch.empty_like(c[:, :1])
    for block, sums in kernel_sums(f, lambda keys: key_columns(v[keys], k[keys])):
        f_v, f_k, f_kron = split_columns(sums[:, 1:] / sums[:, :1], v)
        dq[block] = scale * through_p(c[block], f_v, f_k, f_kron)
        D[block], r[block] = sums[:, :1], (c[block] * f_v).sum(dim=-1, keepdim=True)
    return dq, D, r


def key_gradients(f: Factors, q, v, c, scale, D, r) -> tuple[Tensor, Tensor]:
    """scale p' q and f' c, p' = p_1' - p_2' with p_1' = f' ⊙ (v c') and p_2' = f' diag(r)."""

    def columns(queries: slice) -> Tensor:
        rows = c[queries]
        return torch.cat([rows, r[queries] * q[queries], rowwise_kronecker(rows, q[queries])], dim=-1) / D[queries]

    dk, dv = torch.empty_like(v[:, :1] * q[:1]), torch.empty_like(v)
    for block, sums in kernel_sums(f, columns, transpose=True):
        dv[block], f_rq, f_kron = split_columns(sums, v)
        dk[block] = scale * (contract(v[block], f_kron) - f_rq)
    return dk, dv


def gradients_at_keys(f: Factors, keys: Tensor, q, v, c, scale, D, r) -> tuple[Tensor, Tensor]:
    """scale p' q and f' c at some keys, entry by entry, from the exact kernel and the row sums of the factors."""
    d, rows = q.shape[-1], f.keys[keys]
    # Rows are (x, -|x|^2/2, 1): with the last two swapped their product is -|x - y|^2/2.
    swapped = rows[:, [*range(d), d + 1, d]]
    dk, dv = torch.zeros_like(q[:1] * v[keys, :1]), torch.zeros_like(v[keys])
    for block in blocks(len(q), BLOCK_TOKENS):
        weights = torch.exp(f.queries[block] @ swapped.mT) * f.weights[keys] / D[block]
        dk += scale * (weights * (c[block] @ v[keys].mT - r[block])).mT @ q[block]
        dv += weights.mT @ c[block]
    return dk, dv
