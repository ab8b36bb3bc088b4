"""Almost-linear softmax attention (Section 4.2, Proposition 4.2), with a certificate of its error.

Softmax attention at a query x is a ratio of two sums over the keys y_j, both weighted by exp(x'y_j). Replace
exp(x'y) by an inner product of r features and the sums are formed once for all queries: work and memory are linear
in the sequence length. Two ways to get the features:

- *polynomial*, the paper's: a polynomial near exp on the interval of the logits, expanded in the C(d + g, g)
  monomials of degree at most g;
- *low-rank*: since exp(x'y) = exp(|x|^2/2) exp(|y|^2/2) exp(-|x - y|^2/2), where the first factor cancels in the
  ratio and the second is a weight of the key, what is left is the Gaussian kernel. It is positive definite, at most
  1, and projected onto the functions that r pivots span.

Queries are (..., Lq, d), keys (..., Lk, d), values (..., Lk, dv); no array has Lq x Lk entries.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor
from torch.nn.functional import scaled_dot_product_attention

from ditbook.inputs import require_inputs, require_precision, require_tolerance, typed

# Queries whose exact output certifies a call: random ones, and twice as many as EXTREMES that are likely to be worst.
TESTS, EXTREMES, SHORTLIST = 256, 32, 1024
# Pivots tried first: the tests alone cost as much as 160 pivots, far fewer would save little; but at most L/12.
FIRST_RANK = 320
# Half of the pivots, up to this many, are chosen one by one, which takes a loop; the others are random.
GREEDY = 128
# Gains are ratios of kernel evaluations, exact over fast. Below MIN_GAIN attention is computed exactly; what is
# beyond SPARE_GAIN is not saved but spent on accuracy.
MIN_GAIN, SPARE_GAIN = 1.5, 16.0
# Kernel evaluations that take as long as the fixed work of a call.
OVERHEAD = 2**19
# Shares of the tolerance: the rank is chosen for the first at the tests, the answer accepted below the second.
AIM, ACCEPT = 0.4, 0.5
# The finest tolerance, in units of the dtype's rounding, that is tried: features are rounded before they cancel.
FINEST = 200
# A pivot whose squared distance from the span of the others is below eps^DEPENDENT adds more noise than it explains.
DEPENDENT = 0.8
# Entries of the largest temporary array: a few MiB stay in the cache.
CHUNK = 2**19
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Certificate:
    """What a call of :func:`almost_linear_attention` did, and how far from exact attention it may be.

    Errors are in the unit of the tolerance: largest absolute error over max(1, max abs v). With several heads, every
    field is the worst over the heads, and ``method`` is ``"mixed"`` when they differ.

    ``sampled_error`` compares the output with exact attention at 256 random queries, at the 32 farthest from the mean
    and at 32 that the pivots explain worst (0 where all of it is exact). It is
    statistical: with 95% confidence at most 1.2% of the queries err more, as 0.988^256 < 0.05; that these stay within
    twice the sampled error is experience, not proof.
    ``error_bound`` holds for every query, up to rounding, or is None. It is computed when first read, at a cost of
    L rank^2 for the low-rank method.
    """

    method: str  # "polynomial", "low-rank" or "exact"
    rank: int | None  # number of features; None: exact
    degree: int | None  # of the polynomial; None: another method
    logit_bound: float  # of the absolute scaled logits after centring: max |x| max |y|
    sampled_error: float
    predicted_gain: float  # kernel evaluations of exact attention over this; below 1.5: exact was computed
    fast_share: float  # share of the heads that were not computed exactly
    bounds: tuple[Callable[[], float | None], ...] = field(repr=False, compare=False)

    @cached_property
    def error_bound(self) -> float | None:
        bounds = [bound() for bound in self.bounds]
        return None if None in bounds else max(bounds)


@typed
def softmax_attention(
    q: Float[Tensor, "*batch Lq d"],
    k: Float[Tensor, "*batch Lk d"],
    v: Float[Tensor, "*batch Lk dv"],
    scale: float | int | None = None,
) -> Float[Tensor, "*batch Lq dv"]:
    """Exact attention, softmax(scale q k') v with the softmax over the keys: what the fast methods approximate.

    Computed in blocks of queries, so that no Lq x Lk array arises whichever kernel torch picks.

    :param scale: factor of the logits; None means 1/sqrt(d), the paper's two readings are 1 and 1/d.
    :raises ValueError: empty sequences, dtypes or devices that differ, entries that are not finite.

    Source: Problem 2, Equation 4.5
    """
    require_inputs(scale, q=q, k=k, v=v)
    heads, (Lq, d), Lk = q.shape[:-2].numel(), q.shape[-2:], k.shape[-2]
    # Four dimensions are what torch's fused kernel asks for.
    q4, k4, v4 = (t.reshape(1, heads, *t.shape[-2:]) for t in (q, k, v))
    rows = max(256, 2**25 // (heads * Lk))
    scale = d**-0.5 if scale is None else scale
    parts = [scaled_dot_product_attention(part, k4, v4, scale=scale) for part in q4.split(rows, dim=2)]
    return torch.cat(parts, dim=2).reshape(*q.shape[:-2], Lq, v.shape[-1])


@typed
def almost_linear_attention(
    q: Float[Tensor, "*batch Lq d"],
    k: Float[Tensor, "*batch Lk d"],
    v: Float[Tensor, "*batch Lk dv"],
    scale: float | int | None = None,
    tolerance: float | int = 1e-3,
    return_certificate: bool = False,
    generator: Generator | None = None,
    *,
    attn_mask: object = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Float[Tensor, "*batch Lq dv"] | tuple[Float[Tensor, "*batch Lq dv"], Certificate]:
    """Softmax attention in time and memory linear in the length, within ``tolerance``; exact where that fails.

    The method is chosen by predicted cost, head by head. When no rank whose predicted gain is at least 1.5 meets the
    tolerance, or when the dtype cannot hold it, the answer is exact attention and the certificate says so.

    :param q: queries, float32 or float64; the result has the same dtype and device.
    :param scale: factor of the logits; None means 1/sqrt(d).
    :param tolerance: largest absolute error of the output divided by max(1, max abs v).
    :param return_certificate: also return a :class:`Certificate`.
    :param generator: source of the subsamples; None means a fresh one with a fixed seed.
    :param attn_mask: refused, as are ``dropout_p`` and ``is_causal``: they are here so that code written for torch's
        function is told so.
    :raises ValueError: empty sequences, entries that are not finite, other dtypes, tolerance not positive, a mask,
        dropout, or inputs that require a gradient.

    Source: Proposition 4.2
    """
    if attn_mask is not None or dropout_p != 0.0 or is_causal:
        raise ValueError("attn_mask, dropout_p and is_causal are not possible here: every query attends to every key")
    require_inputs(scale, q=q, k=k, v=v)
    require_precision("q", q)
    require_tolerance(tolerance)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise ValueError("q, k, v must not require a gradient: call under torch.no_grad(), or see ditbook.gradient")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    flat = [t.reshape(-1, *t.shape[-2:]) for t in (q, k, v)]
    output = q.new_empty(len(flat[0]), q.shape[-2], v.shape[-1])
    certificates = []
    for index, (qh, kh, vh) in enumerate(zip(*flat, strict=True)):
        output[index], certificate = _attend(Head(qh, kh, vh, scale, tolerance, generator), return_certificate)
        certificates.append(certificate)
    output = output.reshape(*q.shape[:-1], v.shape[-1])
    return (output, worst_certificate(certificates)) if return_certificate else output


def worst_certificate(certificates: list[Certificate]) -> Certificate:
    methods = {c.method for c in certificates}
    return Certificate(
        method=methods.pop() if len(methods) == 1 else "mixed",
        rank=max((c.rank for c in certificates if c.rank is not None), default=None),
        degree=max((c.degree for c in certificates if c.degree is not None), default=None),
        logit_bound=max(c.logit_bound for c in certificates),
        sampled_error=max(c.sampled_error for c in certificates),
        predicted_gain=min(c.predicted_gain for c in certificates),
        fast_share=sum(c.fast_share for c in certificates) / len(certificates),
        bounds=tuple(bound for c in certificates for bound in c.bounds),
    )


# --- one head ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tests:
    """Some queries and their exact outputs, which share no step with the features that they certify."""

    rows: Tensor  # (t,) indices
    outputs: Tensor  # (t, dv)

    def error(self, output: Tensor) -> float:
        """Largest absolute error of all outputs (Lq, dv) at these queries."""
        return float((output[self.rows] - self.outputs).abs().max())

    def join(self, other: "Tests") -> "Tests":
        return Tests(torch.cat([self.rows, other.rows]), torch.cat([self.outputs, other.outputs]))


@dataclass(frozen=True)
class Head:
    """One head of one call, with what its methods share, computed when first asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    tolerance: float
    generator: Generator

    @cached_property
    def centred(self) -> "Centred":
        return centre(self.q, self.k, self.scale, self.generator)

    @cached_property
    def unit(self) -> float:
        return max(1.0, float(self.v.abs().max()))

    @cached_property
    def tests(self) -> Tests:
        """Random queries and those farthest from the mean."""
        far = self.centred.queries.square().sum(-1).topk(min(EXTREMES, len(self.q))).indices
        return self.test(torch.cat([_random_indices(len(self.q), TESTS, self.generator).to(far.device), far]))

    def test(self, rows: Tensor) -> Tests:
        return Tests(rows, softmax_attention(self.q[rows], self.k, self.v, self.scale))

    def gain(self, features: int, tests: int = TESTS + 2 * EXTREMES) -> float:
        """Kernel evaluations of exact attention over those of a method with so many features."""
        Lq, Lk = len(self.q), len(self.k)
        core = 16 * features**2 + features**3 / 32
        return Lq * Lk / (tests * Lk + features * (Lq + Lk) + core + OVERHEAD)

    def largest_rank(self, gain: float, limit: int) -> int:
        return next((rank for rank in range(limit, 0, -1) if self.gain(rank) >= gain), 0)

    def certificate(self, method: str, **fields) -> Certificate:
        blank = {"rank": None, "degree": None, "sampled_error": 0.0, "bounds": (lambda: None,)}
        share = 0.0 if method == "exact" else 1.0
        return Certificate(method, logit_bound=self.centred.logit_bound, fast_share=share, **blank | fields)


def _attend(head: Head, certify: bool) -> tuple[Tensor, Certificate]:
    """The polynomial method where it is sure to be the cheapest, else low rank, else exact attention."""
    gain = 0.0
    if head.tolerance >= FINEST * torch.finfo(head.q.dtype).eps:
        polynomial = choose_polynomial(head)
        if polynomial is not None:
            return _by_polynomial(head, polynomial, certify)
        answer, gain = _by_low_rank(head)
        if answer is not None:
            return answer
    output = softmax_attention(head.q, head.k, head.v, head.scale)
    return output, head.certificate("exact", predicted_gain=gain)


def _by_polynomial(head: Head, polynomial: "Polynomial", certify: bool) -> tuple[Tensor, Certificate]:
    output = polynomial_attention(head.centred, head.v, polynomial)
    rank = polynomial.features(head.q.shape[-1])
    return output, head.certificate(
        "polynomial",
        rank=rank,
        degree=polynomial.degree,
        # The bound below is rigorous: the tests are for the reader of the certificate only.
        sampled_error=head.tests.error(output) / head.unit if certify else 0.0,
        predicted_gain=head.gain(rank, tests=0),
        bounds=(lambda: polynomial.error_bound,),
    )


def _by_low_rank(head: Head) -> tuple[tuple[Tensor, Certificate] | None, float]:
    """The answer (None: no worthwhile rank meets the tolerance) and the predicted gain of the last rank considered.

    The rank is chosen on the small problem of the tests, for which any leading part of the factors is tried at little
    cost; only then are all queries answered. Where the first factors do not do, the decay of the error foretells how
    many pivots would.
    """
    rank, reached = head.largest_rank(MIN_GAIN, min(FIRST_RANK, len(head.q) // 12, len(head.k) // 12)), 0
    gain, aim = head.gain(max(rank, 1)), AIM * head.tolerance * head.unit
    tests = head.tests if gain >= MIN_GAIN else None
    while gain >= MIN_GAIN:
        factors = factorise(head.centred, rank, head.generator)
        moments = key_moments(factors, head.v)
        answer, tests = _answer(head, factors, moments, tests, aim)
        if answer is not None:
            return answer, gain
        if factors.rank <= reached:  # all new pivots were dependent to rounding: more of them cannot help
            return None, 0.0
        reached = factors.rank
        rank = _next_rank(factors, moments, tests, aim)
        gain = head.gain(rank)
    return None, gain


def _answer(head: Head, factors: "Factors", moments: Tensor, tests: Tests, aim: float):
    """All outputs with their certificate, or None; and the tests, joined by the queries that looked worst.

    At the smallest rank that is good for the tests, or a larger one that costs little; and while the newly tested
    queries turn that down, at the next that is good for them as well.
    """
    rank, spare = 0, head.largest_rank(SPARE_GAIN, factors.rank)
    while rank < factors.rank and leading_error(factors, moments, tests, factors.rank) <= aim:
        if rank < spare and leading_error(factors, moments, tests, spare) <= aim:
            rank = spare
        else:
            rank = smallest_rank(factors, moments, tests, aim, above=rank)
        chosen = factors.truncate(rank)
        output, change = low_rank_attention(chosen, moments[:rank], with_change=True)
        tests = tests.join(head.test(suspects(chosen, change)))
        error = tests.error(output)
        if error <= ACCEPT * head.tolerance * head.unit and _averages(output, head.v, head.tolerance * head.unit):
            gain, bound = head.gain(rank), partial(residual_bound, chosen)
            fields = {"rank": rank, "sampled_error": error / head.unit, "predicted_gain": gain, "bounds": (bound,)}
            return (output, head.certificate("low-rank", **fields)), tests
    return None, tests


def _averages(output: Tensor, v: Tensor, slack: float) -> bool:
    """Whether all outputs lie in the range of the values, as averages must; NaN does not."""
    (low, high), (least, most) = output.aminmax(), v.aminmax()
    return bool((high <= most + slack) & (low >= least - slack))


def _next_rank(factors: "Factors", moments: Tensor, tests: Tests, target: float) -> int:
    """Where a power law through the errors of a quarter and of all pivots meets the target, and a fifth more.

    At least half as many again, because the last error may have met the target and not the queries tested later.
    """
    quarter = max(1, factors.rank // 4)
    early, late = (leading_error(factors, moments, tests, rank) for rank in (quarter, factors.rank))
    slope = math.log(early / late) / math.log(factors.rank / quarter) if 0 < late < early < math.inf else 0.0
    growth = (late / target) ** (1 / max(slope, 0.5))
    return math.ceil(factors.rank * max(1.2 * growth, 1.5)) if growth < 1e4 else 10**6


# --- centring ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Centred:
    """Queries x_i and keys y_j whose kernel exp(x_i'y_j), with weights on the keys, gives the same attention."""

    queries: Tensor  # (Lq, d), mean zero
    keys: Tensor  # (Lk, d), weighted mean zero
    weights: Tensor  # (Lk,), largest 1

    @cached_property
    def logit_bound(self) -> float:
        return float(self.queries.norm(dim=-1).max() * self.keys.norm(dim=-1).max())

    def sample(self, count: int, generator: Generator) -> Tensor:
        """About ``count`` rows, queries and keys in turn; half of the keys are drawn by weight, all else uniformly."""
        half = -(-count // 2)
        cumulative = (self.weights + self.weights.mean()).cumsum(0, dtype=torch.float64)
        points = torch.rand(half, generator=generator, device=generator.device, dtype=torch.float64)
        j = torch.searchsorted(cumulative, points.to(cumulative.device) * cumulative[-1]).clamp_(max=len(self.keys) - 1)
        i = _random_indices(len(self.queries), half, generator).to(j.device)
        return torch.stack([self.queries[i], self.keys[j]], dim=1).flatten(end_dim=1)


def centre(q: Tensor, k: Tensor, scale: float, generator: Generator) -> Centred:
    """Shift and stretch queries and keys so that logits are small, without changing the attention.

    A shift of the keys multiplies a query's whole row, and cancels. A shift a of the queries multiplies column j by
    exp(a'y_j): the weight of key j. A linear map of the queries is undone by its inverse transpose on the keys.
    """
    shift = q.mean(0) * scale
    queries, keys = q * scale - shift, k - k.mean(0)
    weights = query_shift_weights(keys, shift)
    centred = Centred(queries, keys - weights @ keys / weights.sum(), weights)
    rows = centred.sample(4096, generator).double()
    stretch = balance(rows[::2], rows[1::2])
    return replace(
        centred,
        queries=centred.queries @ stretch.to(q.dtype),
        keys=centred.keys @ torch.linalg.inv(stretch).to(q.dtype),
    )


def query_shift_weights(keys: Tensor, shift: Tensor) -> Tensor:
    """exp(shift'y_j) over its largest value: what a shift of the queries leaves behind."""
    exponents = keys @ shift
    return (exponents - exponents.max()).exp()


def balance(queries: Tensor, keys: Tensor) -> Tensor:
    """The symmetric A (d, d) for which queries A and keys A^-1 have the same second moments.

    A^2 is the geometric mean of the keys' moments and the inverse of the queries'.
    """
    moments = [rows.T @ rows / len(rows) for rows in (queries, keys)]
    sizes = [m.trace() for m in moments]
    identity = torch.eye(queries.shape[-1], dtype=queries.dtype, device=queries.device)
    if min(sizes) == 0:
        return identity
    S, R = (m + 1e-8 * size * identity for m, size in zip(moments, sizes, strict=True))
    root = _square_root(S)
    inverse = torch.linalg.inv(root)
    return _square_root(inverse @ _square_root(root @ R @ root) @ inverse)


def _square_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt() @ vectors.T


def _random_indices(bound: int, count: int, generator: Generator) -> Tensor:
    return torch.randint(bound, (count,), generator=generator, device=generator.device)


# --- sums that both methods share -------------------------------------------------------------------------------


def _chunks(length: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK // width)
    return (slice(start, start + step) for start in range(0, length, step))


def _key_sums(features: Callable[[Tensor], Tensor], rank: int, keys: Tensor, weights: Tensor, v: Tensor) -> Tensor:
    """sum_j w_j phi(y_j) (v_j, 1)': (rank, dv + 1), added up in float64."""
    total = v.new_zeros(v.shape[-1] + 1, rank, dtype=torch.float64)
    for part in _chunks(len(keys), rank):
        values = torch.cat([v[part], v.new_ones(len(v[part]), 1)], dim=1) * weights[part, None]
        total += values.T @ features(keys[part])
    return total.T


def _query_ratios(features: Callable[[Tensor], Tensor], queries: Tensor, coefficients: Tensor) -> Tensor:
    """phi(x_i)'C over its last entry, (Lq, dv), for coefficients C (rank, dv + 1) or a stack (..., rank, dv + 1)."""
    *stack, rank, width = coefficients.shape
    C = coefficients.mT.to(queries.dtype).reshape(-1, rank)
    output = queries.new_empty(*stack, len(queries), width - 1)
    for part in _chunks(len(queries), rank):
        sums = (C @ features(queries[part]).T).unflatten(0, (*stack, width))
        output[..., part, :] = (sums[..., :-1, :] / sums[..., -1:, :]).mT
    return output


# --- the low-rank method ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factors:
    """The softmax matrix as D^-1 Phi_q G^-1 Phi_k', with Gaussian features exp(-|x - p|^2/2) of pivots p.

    Phi_q (Lq, r) and Phi_k (Lk, r, with the keys' weights) are formed by parts when asked for; G is the Gaussian
    kernel among the pivots; D makes the rows sum to 1. A leading part of the pivots is a factorisation as well.
    """

    queries: Tensor  # (Lq, d + 2), rows (x, -|x|^2/2, 1)
    keys: Tensor  # (Lk, d + 2), likewise
    weights: Tensor  # (Lk,), largest 1
    pivots: Tensor  # (r, d)
    core: Tensor  # (r, r) float64, lower Cholesky factor of G

    @property
    def rank(self) -> int:
        return len(self.pivots)

    def truncate(self, rank: int) -> "Factors":
        """The factorisation by the first ``rank`` pivots."""
        return replace(self, pivots=self.pivots[:rank], core=self.core[:rank, :rank])

    @cached_property
    def exponents(self) -> Tensor:
        """Columns (p, 1, -|p|^2/2) in units of log 2, float64: torch is quicker at powers of 2 than at exp."""
        p = self.pivots.double()
        return torch.cat([p, p.new_ones(self.rank, 1), p.square().sum(-1, keepdim=True) / -2], dim=1).T * LOG2E

    def features(self, rows: Tensor) -> Tensor:
        """exp(-|x - p|^2/2) for rows (x, -|x|^2/2, 1): (n, d + 2) to (n, r)."""
        return (rows @ self.exponents.to(rows.dtype)).exp2_()

    def query_features(self, rows: slice = slice(None)) -> Tensor:
        return self.features(self.queries[rows])

    def key_features(self, rows: slice = slice(None)) -> Tensor:
        return self.features(self.keys[rows]) * self.weights[rows, None]

    def solve(self, moments: Tensor) -> Tensor:
        """G^-1 times (r, m), in float64."""
        return torch.cholesky_solve(moments.double(), self.core)


@typed
def exp_factors(
    q: Float[Tensor, "Lq d"],
    k: Float[Tensor, "Lk d"],
    rank: int,
    scale: float | int | None = None,
    generator: Generator | None = None,
) -> Factors:
    """Factors of rank at most ``rank`` of softmax(scale q k'), one head; fewer where rounding allows no more.

    :param scale: factor of the logits; None means 1/sqrt(d).
    :raises ValueError: rank below 1, empty sequences, entries that are not finite.

    Source: Lemma G.3
    """
    require_inputs(scale, q=q, k=k)
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    return factorise(centre(q, k, scale, generator), rank, generator)


def factorise(centred: Centred, rank: int, generator: Generator) -> Factors:
    queries, keys = _with_norms(centred.queries), _with_norms(centred.keys)
    log_weights = centred.weights.log() - keys[:, -2]  # the key's own factor exp(|y|^2/2)
    pivots = choose_pivots(centred.sample(16 * rank, generator), rank)
    gram = _gaussian(pivots.double())
    threshold = torch.finfo(pivots.dtype).eps ** DEPENDENT
    core, failed = torch.linalg.cholesky_ex(gram)
    if failed or core.diagonal().min() ** 2 <= threshold:
        load = threshold / 10
        keep = _cholesky(gram + load * torch.eye(len(gram)).to(gram), load).diagonal().square() > threshold
        pivots, core = pivots[keep], _cholesky(gram[keep][:, keep], load)
    return Factors(queries, keys, (log_weights - log_weights.max()).exp(), pivots, core)


def _cholesky(gram: Tensor, load: float) -> Tensor:
    """The Cholesky factor; of a loaded matrix where rounding left no other. The residual stays a positive kernel."""
    core, failed = torch.linalg.cholesky_ex(gram)
    while failed:
        core, failed = torch.linalg.cholesky_ex(gram + load * torch.eye(len(gram)).to(gram))
        load *= 10
    return core


def choose_pivots(sample: Tensor, rank: int) -> Tensor:
    """Pivots by greedy Cholesky on a part of the sample, then random rows, each moved to the mean of its cell.

    The Gaussian kernel is a diagonal scaling of exp(x'y): it leaves the factorisation alone, and makes the greedy
    choice one of coverage rather than of size. The mean of the rows nearest to a pivot (one step of k-means) serves
    all of them: in many dimensions it lies inward, where fewer functions are needed; in a tight cluster nothing moves.
    """
    pool, rest = sample[: 2 * rank], sample[2 * rank :]
    chosen = pool[greedy_cholesky(pool, min(GREEDY, -(-rank // 2)))]
    pivots = torch.cat([chosen, rest[: rank - len(chosen)]])
    sums, counts = torch.zeros_like(pivots), pivots.new_zeros(len(pivots), 1)
    for part in _chunks(len(sample), len(pivots)):
        nearest = torch.addmm(-pivots.square().sum(-1) / 2, sample[part], pivots.T).argmax(1)
        sums.index_add_(0, nearest, sample[part])
        counts.index_add_(0, nearest, counts.new_ones(len(nearest), 1))
    return torch.where(counts > 0, sums / counts.clamp_min(1), pivots)


def greedy_cholesky(pool: Tensor, rank: int) -> Tensor:
    """Indices of up to ``rank`` rows, each the one whose Gaussian is farthest from the span of those before.

    A short loop over short vectors: numpy is several times quicker at it than torch.
    """
    Z = pool.cpu().numpy()
    half_norms = np.square(Z).sum(1) / 2
    residual, L, chosen = np.ones_like(half_norms), np.empty((rank, len(Z)), Z.dtype), []
    for i in range(rank):
        pivot = int(residual.argmax())
        if residual[pivot] <= np.finfo(Z.dtype).eps ** DEPENDENT:
            break
        chosen.append(pivot)
        column = np.exp(Z @ Z[pivot] - half_norms - half_norms[pivot]) - L[:i, pivot] @ L[:i]
        L[i] = column / math.sqrt(residual[pivot])
        residual -= L[i] * L[i]
        residual[pivot] = 0
    return torch.tensor(chosen, device=pool.device)


def _with_norms(rows: Tensor) -> Tensor:
    """Rows (x, -|x|^2/2, 1): their product with (p, 1, -|p|^2/2) is -|x - p|^2/2."""
    return torch.cat([rows, rows.square().sum(-1, keepdim=True) / -2, rows.new_ones(len(rows), 1)], dim=1)


def _gaussian(pivots: Tensor) -> Tensor:
    return (torch.cdist(pivots, pivots, compute_mode="donot_use_mm_for_euclid_dist").square() / -2).exp()


def key_moments(factors: Factors, v: Tensor) -> Tensor:
    """Phi_k'(v, 1): (r, dv + 1), float64."""
    return _key_sums(factors.features, factors.rank, factors.keys, factors.weights, v)


def low_rank_attention(factors: Factors, moments: Tensor, with_change: bool = False):
    """All outputs (Lq, dv) from the moments of the keys; G^-1 acts on their few columns, never on L rows.

    ``with_change``: also how far the last quarter of the pivots moved each output, (Lq,), a hint of its error.
    """
    coefficients = factors.solve(moments)
    if not with_change:
        return _query_ratios(factors.features, factors.queries, coefficients)
    fewer = max(1, factors.rank * 3 // 4)
    coarse = torch.zeros_like(coefficients)
    coarse[:fewer] = factors.truncate(fewer).solve(moments[:fewer])
    output, rough = _query_ratios(factors.features, factors.queries, torch.stack([coefficients, coarse]))
    return output, (output - rough).abs().amax(-1)


def leading_error(factors: Factors, moments: Tensor, tests: Tests, rank: int) -> float:
    """Largest absolute error at the tests of the factorisation by the first ``rank`` pivots."""
    part = factors.truncate(rank)
    output = _query_ratios(part.features, factors.queries[tests.rows], part.solve(moments[:rank]))
    return float((output - tests.outputs).abs().max())


def smallest_rank(factors: Factors, moments: Tensor, tests: Tests, target: float, above: int = 0) -> int:
    """A rank that is good for the tests while a sixteenth less is not; by bisection, all pivots being good."""
    bad, good = above, factors.rank
    while good - bad > max(1, good // 16):
        middle = (bad + good) // 2
        if leading_error(factors, moments, tests, middle) <= target:
            good = middle
        else:
            bad = middle
    return good


def suspects(factors: Factors, change: Tensor) -> Tensor:
    """Indices of the queries worst explained by the pivots, among the many whose outputs the last pivots moved most.

    The residual (see :func:`residual_bound`) tells best which errors are large, but is too dear for every query.
    """
    moved = change.topk(min(SHORTLIST, len(change))).indices
    return moved[residuals(factors, factors.queries[moved]).topk(min(EXTREMES, len(moved))).indices]


def residuals(factors: Factors, rows: Tensor) -> Tensor:
    """sqrt(R_ii), float64: the distance of the Gaussian of each row (x, -|x|^2/2, 1) from the span of the pivots."""
    parts = [_with_norms(rows[part, :-2].double()) for part in _chunks(len(rows), factors.rank)]
    halves = (torch.linalg.solve_triangular(factors.core, factors.features(part).T, upper=False) for part in parts)
    return torch.cat([(1 - half.square().sum(0)).clamp_min(0).sqrt() for half in halves])


def residual_bound(factors: Factors) -> float | None:
    """A bound of the output error over max abs v for every query, up to rounding; None where no denominator allows it.

    The residual kernel R is positive semidefinite, so |R_ij| <= sqrt(R_ii R_jj), and the error at query i is at most
    2 sqrt(R_ii) sum_j w_j sqrt(R_jj) / D_i with D_i > 0 the approximate denominator.

    Source: Book 5
    """
    ones = factors.queries.new_ones(len(factors.keys), 0)
    coefficients = factors.solve(key_moments(factors, ones))
    spread = factors.weights.double() @ residuals(factors, factors.keys)
    denominators = torch.cat(
        [
            factors.query_features(part).double() @ coefficients[:, 0]
            for part in _chunks(len(factors.queries), factors.rank)
        ]
    )
    if not (denominators > 0).all():
        return None
    return float((2 * residuals(factors, factors.queries) * spread / denominators).max())


# --- the polynomial method --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Polynomial:
    """A polynomial near exp on [-bound, bound]: coefficients c_0 ... c_g, and the largest *relative* error there."""

    coefficients: tuple[float, ...]
    relative_error: float

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    @property
    def error_bound(self) -> float:
        """Of the output over max abs v: every weight is off by a factor between 1 - e and 1 + e, so is their sum."""
        e = self.relative_error
        return 2 * e / (1 - e) if e < 1 else math.inf

    def features(self, d: int) -> int:
        return math.comb(d + self.degree, d)


def choose_polynomial(head: Head) -> Polynomial | None:
    """The first even degree that meets the tolerance, if it costs at most half of the tests of the other method."""
    bound, d, (Lq, Lk) = head.centred.logit_bound, head.q.shape[-1], (len(head.q), len(head.k))
    # Terms as large as exp(bound) may cancel down to exp(-bound).
    rounding = 8 * torch.finfo(head.q.dtype).eps * math.exp(min(2 * bound, 700))
    if 2 * rounding > ACCEPT * head.tolerance:
        return None  # no degree is enough
    degree = 0
    while math.comb(d + degree, d) * (Lq + Lk) <= TESTS * Lk / 2:
        polynomial = exp_polynomial(bound, degree)
        polynomial = replace(polynomial, relative_error=polynomial.relative_error + rounding)
        if polynomial.error_bound <= ACCEPT * head.tolerance:
            return polynomial if head.gain(polynomial.features(d), tests=0) >= MIN_GAIN else None
        degree += 2
    return None


def exp_polynomial(bound: float, degree: int) -> Polynomial:
    """Nearly the best polynomial for the relative error, by least squares at Chebyshev points weighted with exp(-t).

    Relative, because an absolute error of order 1 where exp is exp(-bound) turns denominators negative; of even
    degree, because an odd one turns negative beyond the interval.
    """
    t = np.cos(np.pi * (np.arange(8 * degree + 8) + 0.5) / (8 * degree + 8))
    weighted = np.polynomial.chebyshev.chebvander(t, degree) * np.exp(-bound * t)[:, None]
    solution = np.linalg.lstsq(weighted, np.ones_like(t), rcond=None)[0]
    in_t = np.polynomial.chebyshev.cheb2poly(solution)
    in_t = np.pad(in_t, (0, degree + 1 - len(in_t)))
    fine = np.linspace(-1, 1, 4001)
    error = np.abs(np.polynomial.polynomial.polyval(fine, in_t) * np.exp(-bound * fine) - 1).max()
    return Polynomial(tuple((in_t / (bound or 1.0) ** np.arange(degree + 1)).tolist()), float(error))


def polynomial_attention(centred: Centred, v: Tensor, polynomial: Polynomial) -> Tensor:
    """All outputs by (x'y)^j = sum over |a| = j of (j!/a!) x^a y^a, the monomials of x and y being the features."""
    degree, d = polynomial.degree, centred.queries.shape[-1]
    exponents = _expand(torch.zeros(1, d), torch.eye(d), torch.add, degree).double()
    orders = exponents.sum(-1)
    weights = (torch.lgamma(orders + 1) - torch.lgamma(exponents + 1).sum(-1)).exp()
    weights *= torch.tensor(polynomial.coefficients, dtype=torch.float64)[orders.long()]

    def monomials(rows: Tensor) -> Tensor:
        return _expand(rows.new_ones(1, len(rows)), rows.T.contiguous(), torch.mul, degree).T

    moments = _key_sums(monomials, len(weights), centred.keys, centred.weights, v)
    return _query_ratios(monomials, centred.queries, moments * weights.to(v.device)[:, None])


def _expand(one: Tensor, variables: Tensor, combine: Callable[[Tensor, Tensor], Tensor], degree: int) -> Tensor:
    """All products of at most ``degree`` variables, degree by degree and within one by the last variable.

    In that order the products of j - 1 of the first i + 1 variables are the first C(j - 1 + i, i) of their degree,
    so each product is one operation away from an earlier one.
    """
    blocks = [one]
    for j in range(1, degree + 1):
        parts = [combine(blocks[-1][: math.comb(j - 1 + i, i)], variable) for i, variable in enumerate(variables)]
        blocks.append(torch.cat(parts))
    return torch.cat(blocks)
