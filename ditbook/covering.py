"""Covering numbers of the paper's transformer class, in logarithms that never overflow (Appendix F.2).

``log10_log_covering_number`` is the paper's norm-based bound for a cover on a sample. ``log10_log_parameter_cover``
counts parameters instead and covers uniformly over all bounded inputs: the book's own, elementary bound.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ditbook.inputs import typed

Number = int | float


@dataclass(frozen=True)
class NormProfile:
    """The constants of Definition 3.2 that bound a network's weights, in the paper's orientation.

    ``C_OV``, ``C_KQ``, ``C_F`` bound operator norms; the fields ending in ``_2inf`` bound the 2,inf norms that
    Definition 3.2 pairs with them; ``C_X`` and ``C_E`` bound the 2,inf norm of the input and of the positional
    encoding.

    Source: Definition 3.2
    """

    blocks: int
    d: int
    heads: int
    head_size: int
    C_OV: float
    C_OV_2inf: float
    C_KQ: float
    C_KQ_2inf: float
    C_F: float
    C_F_2inf: float
    C_E: float
    C_X: float


@typed
def greedy_cover(values: Float[Tensor, "functions n ..."], eps: Number) -> list[int]:
    """Indices of a cover: every function is within ``eps`` of a chosen one at all n points of the sample.

    A function is chosen when no earlier choice is within ``eps`` of it, so the choices are also ``eps``-separated:
    their number lies between the covering numbers at ``eps`` and at ``eps / 2``.

    :param values: ``values[k, i]`` is the output of function k at sample point i, a number or an array.
    :param eps: radius, in the Euclidean (Frobenius) norm of the outputs; the maximum is taken over the sample.
    :raises ValueError: ``eps`` not positive.

    Source: Definition F.1
    """
    _positive(eps=eps)
    outputs = values.flatten(start_dim=2) if values.dim() > 2 else values.unsqueeze(-1)
    chosen: list[int] = []
    for k, output in enumerate(outputs):
        distances = (outputs[chosen] - output).norm(dim=-1).amax(dim=-1)
        if not (distances <= eps).any():
            chosen.append(k)
    return chosen


@typed
def log10_log_covering_number(profile: NormProfile, n: Number, L: Number, eps: Number) -> float:
    """log10 of the bound on the natural logarithm of the covering number at radius ``eps`` on ``n`` samples.

    The product in alpha_i is read as printed: all factors, ``C_X + C_E`` among them, once for each earlier block.
    Minus infinity stands for a bound of 0, infinity for a logarithm beyond the range of floats.

    :param profile: norm bounds of the class.
    :param L: tokens per input.
    :raises ValueError: ``eps`` not positive, or ``n``, ``L`` or the number of blocks below 1.

    Source: Lemma F.6
    """
    _positive(eps=eps)
    _at_least_one(n=n, L=L, blocks=profile.blocks)
    log_alphas = _log_geometric_sum(2 / 3 * log_block_growth(profile), profile.blocks)
    log_log_nL = _log(math.log(n) + math.log(L))
    return (log_log_nL - 2 * math.log(eps) + 3 * (log_alphas + log_block_size(profile))) / math.log(10)


def log_block_growth(profile: NormProfile) -> float:
    """log of C_F^2 C_OV (1 + 4 C_KQ)(C_X + C_E), by which alpha_i grows from one block to the next.

    Source: Lemma F.6
    """
    p = profile
    return 2 * _log(p.C_F) + _log(p.C_OV) + _log(1 + 4 * p.C_KQ) + _log(p.C_X + p.C_E)


def log_block_size(profile: NormProfile) -> float:
    """log of the bracket of Lemma F.6: what the three weight matrices of one block contribute.

    Source: Lemma F.6
    """
    p = profile
    feed_forward = math.log(p.d) + 2 * _log(p.C_F_2inf)
    key_query = math.log(2 * p.d) + 2 * _log(p.C_F) + _log(p.C_OV) + _log(p.C_KQ_2inf)
    value = math.log(p.head_size) + 2 * _log(p.C_F) + _log(p.C_OV_2inf)
    terms = [2 / 3 * feed_forward, 2 / 3 * key_query, math.log(p.heads) + 2 / 3 * value]
    return float(np.logaddexp.reduce(terms))


@typed
def log10_log_parameter_cover(profile: NormProfile, hidden: int, bias: Number, eps: Number) -> float:
    """log10 of log N when the parameters are covered instead: a *uniform* cover over all inputs, biases included.

    Two networks of the class whose weight matrices differ by at most eta in operator norm (biases in Euclidean
    norm) differ by at most ``eta * K * local * lipschitz^K`` in every token of every input with tokens of norm at
    most ``C_X``. So eta = eps / (K local lipschitz^K) is fine enough, and a ball of radius C in p dimensions has
    an eta-cover of (1 + 2 C / eta)^p points. Identity terms and biases are counted; there is no normalisation.

    :param hidden: width l of the feed-forward layers.
    :param bias: bound on the Euclidean norm of each bias.
    :param eps: radius, in the largest Euclidean norm of an output token.
    :raises ValueError: ``eps`` not positive, ``hidden`` or the number of blocks below 1, ``bias`` negative.

    Source: Erratum 45
    """
    _positive(eps=eps)
    _at_least_one(hidden=hidden, blocks=profile.blocks)
    if bias < 0:
        raise ValueError(f"bias must not be negative, got {bias}")
    K, p = _float(profile.blocks), profile
    log_resolution = math.log(K / eps) + _log_parameter_slope(p, bias) + K * _log_lipschitz(p, bias)
    counts_and_radii = [
        (p.heads * p.d**2, p.C_OV),
        (p.heads * p.d**2, p.C_KQ),
        (2 * hidden * p.d, p.C_F),
        (hidden + p.d, bias),
    ]
    log_points = [count * np.logaddexp(0, _log(2 * radius) + log_resolution) for count, radius in counts_and_radii]
    return _log(K * sum(log_points)) / math.log(10)


def _log_token_norm(p: NormProfile, bias: Number) -> float:
    """log of the largest norm a token can reach anywhere in the network."""
    growth = _log_feed_forward(p) + _log(1 + p.heads * p.C_OV)
    K = _float(p.blocks)
    return K * growth + _log(p.C_X + p.C_E + K * (1 + p.C_F) * bias)


def _log_feed_forward(p: NormProfile) -> float:
    """log of 1 + C_F^2, the Lipschitz constant of a feed-forward layer with its identity term."""
    return float(np.logaddexp(0, 2 * _log(p.C_F)))


def _log_lipschitz(p: NormProfile, bias: Number) -> float:
    """log of a Lipschitz constant of one block, in the largest token norm, for tokens up to the norm above."""
    through_softmax = np.logaddexp(0, _log(2 * p.C_KQ) + 2 * _log_token_norm(p, bias))
    return float(_log_feed_forward(p) + np.logaddexp(0, _log(p.heads * p.C_OV) + through_softmax))


def _log_parameter_slope(p: NormProfile, bias: Number) -> float:
    """log of the change of one block's output per unit change of its parameters."""
    rho = _log_token_norm(p, bias)
    attention = math.log(p.heads) + rho + np.logaddexp(0, _log(p.C_OV) + 2 * rho)
    feed_forward = np.logaddexp(_log(2 * p.C_F) + rho, _log(p.C_F + bias + 1))
    return float(np.logaddexp(_log_feed_forward(p) + attention, feed_forward))


@typed
def log10_xi(n: Number, eps: Number, L: Number) -> float:
    """log10 of xi(n, eps, L) = n^(-1/3) 2^((1/eps)^(2L)) + n^(-1/3) + eps^2.

    Infinity stands for a logarithm beyond the range of floats.

    :raises ValueError: ``eps`` not positive, or ``n`` or ``L`` below 1.

    Source: Definition 3.4
    """
    _positive(eps=eps)
    _at_least_one(n=n, L=L)
    rate = -math.log(n) / 3
    log_exponent = -2 * L * math.log(eps)
    exponent = math.exp(log_exponent) if log_exponent < 700 else math.inf
    terms = [rate + exponent * math.log(2), rate, 2 * math.log(eps)]
    return float(np.logaddexp.reduce(terms)) / math.log(10)


def _log_geometric_sum(log_ratio: float, K: int) -> float:
    """log of 1 + r + ... + r^(K-1), from the closed form."""
    if log_ratio == 0:
        return math.log(K)
    K, size = _float(K), abs(log_ratio)
    return max(log_ratio, 0.0) * (K - 1) + math.log(math.expm1(-K * size) / math.expm1(-size))


def _float(K: int) -> float:
    return float(K) if K < 1e300 else math.inf


def _log(x: Number) -> float:
    return math.log(x) if x > 0 else -math.inf


def _positive(**values: Number) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, got {value}")


def _at_least_one(**values: Number) -> None:
    for name, value in values.items():
        if not value >= 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
