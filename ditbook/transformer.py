"""The score network of the paper, from the patches of an image to the score (Sections 2.3 and 3.1).

Read top to bottom it is Figure 1: the reshape layer R, attention, feed-forward layer and positional encoding of
the transformer f_T, the latent network f = R^-1 f_T R with time, and the score network around it. The end
measures a network by the constants of Definition 3.2. Tokens are rows, ``(..., L, d)``; every weight keeps the
shape that the paper gives it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from ditbook.covering import NormProfile
from ditbook.diffusion import ForwardProcess, Time, as_time, require_time
from ditbook.inputs import require_dtype, typed
from ditbook.subspace import orthonormalise, require_orthonormal

# New residual branches and positional encodings are small, so that a new network is close to the identity.
RESIDUAL_GAIN = 0.1

# ---------------------------------------------------------------------------------------------------------------
# R: from a latent vector to tokens and back


@dataclass(frozen=True)
class Patchify:
    """The reshape layer R for images: cut an ``i x i`` image into ``p x p`` patches, one token each.

    Both the image's vector (channel, row, column) and the tokens (row by row over the image) are row-major; a
    token holds its patch in the order (channel, row, column). R permutes entries, so it is an isometry.

    :param i: side of the image in pixels.
    :param p: side of a patch in pixels; divides ``i``.
    :param channels: colour channels; the paper has 1.
    :raises ValueError: a size below 1, or ``p`` that does not divide ``i``.

    Source: Definition 3.1
    """

    i: int
    p: int
    channels: int = 1

    def __post_init__(self):
        _positive(i=self.i, p=self.p, channels=self.channels)
        if self.i % self.p:
            raise ValueError(f"p must divide the image side i = {self.i}, got p = {self.p}")

    @property
    def d(self) -> int:
        """Token width, ``channels p p``."""
        return self.channels * self.p**2

    @property
    def L(self) -> int:
        """Number of tokens, ``(i/p)^2``."""
        return (self.i // self.p) ** 2

    def __call__(self, h: Float[Tensor, "*batch d0"]) -> Float[Tensor, "*batch L d"]:
        """R: vectors ``(..., channels i i)`` to tokens ``(..., L, channels p p)``."""
        _require_shape("h", h, d0=self.d * self.L)
        side = self.i // self.p
        grid = h.reshape(*h.shape[:-1], self.channels, side, self.p, side, self.p)
        return torch.einsum("...crpsq->...rscpq", grid).reshape(*h.shape[:-1], self.L, self.d)

    def inverse(self, X: Float[Tensor, "*batch L d"]) -> Float[Tensor, "*batch d0"]:
        """R^-1: tokens ``(..., L, channels p p)`` to vectors ``(..., channels i i)``."""
        _require_shape("X", X, L=self.L, d=self.d)
        side = self.i // self.p
        grid = X.reshape(*X.shape[:-2], side, side, self.channels, self.p, self.p)
        return torch.einsum("...rscpq->...crpsq", grid).reshape(*X.shape[:-2], self.d * self.L)


@dataclass(frozen=True)
class Fold:
    """The reshape layer R for latents that are no image: ``d L`` numbers become ``L`` rows of ``d``, in order.

    Source: Definition 3.1
    """

    d: int
    L: int

    def __post_init__(self):
        _positive(d=self.d, L=self.L)

    def __call__(self, h: Float[Tensor, "*batch d0"]) -> Float[Tensor, "*batch L d"]:
        """R: vectors ``(..., d L)`` to tokens ``(..., L, d)``."""
        _require_shape("h", h, d0=self.d * self.L)
        return h.unflatten(-1, (self.L, self.d))

    def inverse(self, X: Float[Tensor, "*batch L d"]) -> Float[Tensor, "*batch d0"]:
        """R^-1: tokens ``(..., L, d)`` to vectors ``(..., d L)``."""
        _require_shape("X", X, L=self.L, d=self.d)
        return X.flatten(-2)


# ---------------------------------------------------------------------------------------------------------------
# f_T: attention, feed-forward layer, blocks


def attend(q: Float[Tensor, "N heads L m"], k: Float[Tensor, "N heads L m"], v: Float[Tensor, "N heads L m"]):
    """``softmax(q k') v`` without a 1/sqrt(m): the paper has none, and takes the softmax over keys.

    The inputs have four dimensions because only then does torch run its fused kernel, which never holds the
    ``L x L`` weights.
    """
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def split_heads(X: Float[Tensor, "N L d"], W: Float[Tensor, "heads m d"]) -> Float[Tensor, "N heads L m"]:
    """``W^i X`` for every head i, tokens as rows."""
    return F.linear(X, W.flatten(0, 1)).unflatten(-1, W.shape[:2]).transpose(1, 2)


def merge_heads(Z: Float[Tensor, "N heads L m"], W_O: Float[Tensor, "heads d m"]) -> Float[Tensor, "N L d"]:
    """``sum_i W_O^i Z^i``, tokens as rows."""
    return F.linear(Z.transpose(1, 2).flatten(2), W_O.transpose(0, 1).flatten(1))


class Attention(nn.Module):
    """Self-attention with a skip connection, ``X + sum_i W_O^i W_V^i X softmax((W_K^i X)' W_Q^i X)``.

    Unlike torch's ``MultiheadAttention`` it does not divide the logits by the square root of the head size, and
    ``d`` need not be ``heads * head_size``. Weights: ``W_Q, W_K, W_V`` (heads, m, d), ``W_O`` (heads, d, m) and,
    with ``query_bias``, ``b_Q`` (heads, m), which the paper's construction needs but its formula lacks.

    The fused kernel has no batching rule and no second derivative. Under ``torch.func.vmap``, ``jvp`` or double
    backward, wrap the call in ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.

    :param d: token width.
    :param heads: number of heads (the paper's r, also tau).
    :param head_size: rows of ``W_Q``, ``W_K`` and ``W_V`` (the paper's m).
    :param query_bias: add ``b_Q`` to the queries.
    :param generator: source of the initial weights; None means a fresh one with seed 0.
    :raises ValueError: a size below 1.

    Source: Equation 2.6
    """

    def __init__(
        self, d: int, heads: int, head_size: int, query_bias: bool = False, generator: torch.Generator | None = None
    ):
        super().__init__()
        _positive(d=d, heads=heads, head_size=head_size)
        generator = generator or torch.Generator().manual_seed(0)
        self.W_Q = _weight((heads, head_size, d), d, generator)
        self.W_K = _weight((heads, head_size, d), d, generator)
        self.W_V = _weight((heads, head_size, d), d, generator)
        self.W_O = _weight((heads, d, head_size), heads * head_size, generator, RESIDUAL_GAIN)
        self.b_Q = nn.Parameter(torch.zeros(heads, head_size)) if query_bias else None

    def forward(self, X: Float[Tensor, "*batch L d"]) -> Float[Tensor, "*batch L d"]:
        """Tokens ``(..., L, d)`` to tokens ``(..., L, d)``."""
        tokens = X.reshape(-1, *X.shape[-2:])
        q, k, v = (split_heads(tokens, W) for W in (self.W_Q, self.W_K, self.W_V))
        if self.b_Q is not None:
            q = q + self.b_Q[:, None]
        return X + merge_heads(attend(q, k, v), self.W_O).reshape(X.shape)

    @property
    def W_OV(self) -> Float[Tensor, "heads d d"]:
        """``W_O^i W_V^i`` for every head."""
        return self.W_O @ self.W_V

    @property
    def W_KQ(self) -> Float[Tensor, "heads d d"]:
        """``(W_K^i)' W_Q^i`` for every head."""
        return self.W_K.mT @ self.W_Q


class FeedForward(nn.Module):
    """Token-wise feed-forward layer with a skip connection, ``Y + W_2 ReLU(W_1 Y + b_1 1') + b_2 1'``.

    :param d: token width.
    :param hidden: number of ReLUs (the paper's l).
    :param generator: source of the initial weights; None means a fresh one with seed 0.
    :raises ValueError: a size below 1.

    Source: Equation 2.7
    """

    def __init__(self, d: int, hidden: int, generator: torch.Generator | None = None):
        super().__init__()
        _positive(d=d, hidden=hidden)
        generator = generator or torch.Generator().manual_seed(0)
        self.W_1 = _weight((hidden, d), d, generator)
        self.b_1 = nn.Parameter(torch.zeros(hidden))
        self.W_2 = _weight((d, hidden), hidden, generator, RESIDUAL_GAIN)
        self.b_2 = nn.Parameter(torch.zeros(d))

    def forward(self, Y: Float[Tensor, "*batch L d"]) -> Float[Tensor, "*batch L d"]:
        """Tokens ``(..., L, d)`` to tokens ``(..., L, d)``."""
        return Y + F.linear(F.relu(F.linear(Y, self.W_1, self.b_1)), self.W_2, self.b_2)


class Transformer(nn.Module):
    """The transformer f_T: blocks applied to ``X + E``. The defaults are the paper's class T^{2,1,4}.

    The positional encoding ``E`` (L, d) is a parameter like the others; set it to zero for a network that
    commutes with permutations of the tokens.

    :param d: token width.
    :param L: number of tokens.
    :param blocks: number of blocks (the paper's K).
    :param heads: heads of each attention layer.
    :param head_size: size of each head.
    :param hidden: ReLUs of each feed-forward layer.
    :param query_bias: give every attention layer a query bias.
    :param generator: source of the initial weights; None means a fresh one with seed 0.
    :raises ValueError: a size below 1.

    Source: Equation 2.8, Definition 3.2
    """

    def __init__(
        self,
        d: int,
        L: int,
        blocks: int,
        heads: int = 2,
        head_size: int = 1,
        hidden: int = 4,
        query_bias: bool = False,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        _positive(d=d, L=L, blocks=blocks)
        generator = generator or torch.Generator().manual_seed(0)
        self.d, self.L = d, L
        self.E = _weight((L, d), d, generator, RESIDUAL_GAIN)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                OrderedDict(
                    attention=Attention(d, heads, head_size, query_bias, generator),
                    feed_forward=FeedForward(d, hidden, generator),
                )
            )
            for _ in range(blocks)
        )

    def forward(
        self, X: Float[Tensor, "*batch L d"], modulation: Float[Tensor, "*#batch sites 2 1 d"] | None = None
    ) -> Float[Tensor, "*batch L d"]:
        """Tokens ``(..., L, d)`` to tokens ``(..., L, d)``.

        :param modulation: scale and shift before every block and after the last (``TimeModulation``); None is the
            paper's network.
        :raises ValueError: X is not of shape (..., L, d).
        """
        _require_shape("X", X, L=self.L, d=self.d)
        X = X + self.E
        sites = [None] * (len(self.blocks) + 1) if modulation is None else modulation.unbind(-4)
        for block, site in zip(self.blocks, sites[:-1], strict=True):
            X = block(modulate(X, site))
        return modulate(X, sites[-1])


# ---------------------------------------------------------------------------------------------------------------
# f: the latent network, with time


def modulate(X: Float[Tensor, "*batch L d"], site: Float[Tensor, "*#batch 2 1 d"] | None):
    """``(1 + scale) X + shift``, the same for every token; ``site`` holds scale and shift, None changes nothing."""
    if site is None:
        return X
    scale, shift = site.unbind(-3)
    return (1 + scale) * X + shift


class TimeModulation(nn.Module):
    """Scales and shifts computed from t, as in DiT: sines of log t, one hidden layer, and a last layer of zeros.

    Because the last layer starts at zero, a new network does not depend on t at all: it starts as the paper's f_T.

    :param d: token width.
    :param sites: number of (scale, shift) pairs.
    :param width: number of time features, even.
    """

    def __init__(self, d: int, sites: int, width: int, generator: torch.Generator):
        super().__init__()
        if width % 2:
            raise ValueError(f"time_features must be even (sines and cosines), got {width}")
        self.register_buffer("frequencies", 2.0 ** torch.linspace(-3, 2, width // 2))
        self.W_in = _weight((width, width), width, generator)
        self.b_in = nn.Parameter(torch.zeros(width))
        self.W_out = nn.Parameter(torch.zeros(sites, 2, 1, d, width))

    def forward(self, t: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch sites 2 1 d"]:
        """Times ``(...)`` to scales and shifts ``(..., sites, 2, 1, d)``; the 1 stands for the tokens."""
        angles = t[..., None].log() * self.frequencies
        features = F.silu(F.linear(torch.cat([angles.sin(), angles.cos()], -1), self.W_in, self.b_in))
        return F.linear(features, self.W_out.flatten(0, -2)).unflatten(-1, self.W_out.shape[:-1])


class LatentTransformer(nn.Module):
    """The latent network ``f(h, t) = R^-1 f_T(R h)``, where t enters as scale and shift of the tokens.

    :param transformer: f_T, working on tokens ``(..., L, d)``.
    :param reshape: R; None folds the vector row by row. ``Patchify`` is for latents that are images.
    :param time_features: width of the time embedding, even; 0 leaves t out, as the paper's theory does.
    :param generator: source of the initial time weights; None means a fresh one with seed 0.
    :raises ValueError: R and f_T disagree on the tokens' shape, or ``time_features`` is negative or odd.

    Source: Definition 3.3
    """

    def __init__(
        self,
        transformer: Transformer,
        reshape: Patchify | Fold | None = None,
        time_features: int = 32,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        d, L = transformer.d, transformer.L
        self.reshape = reshape or Fold(d, L)
        if (self.reshape.d, self.reshape.L) != (d, L):
            raise ValueError(
                f"reshape makes tokens (L, d) = ({self.reshape.L}, {self.reshape.d}), f_T takes ({L}, {d})"
            )
        if time_features < 0:
            raise ValueError(f"time_features must not be negative, got {time_features}")
        self.transformer = transformer
        self.d0 = d * L
        generator = generator or torch.Generator().manual_seed(0)
        sites = len(transformer.blocks) + 1
        self.time = TimeModulation(d, sites, time_features, generator) if time_features else None

    def forward(self, h: Float[Tensor, "*batch d0"], t: Float[Tensor, "*#batch"]) -> Float[Tensor, "*batch d0"]:
        """Latents ``(..., d L)`` and times broadcastable to ``(...)`` to latents ``(..., d L)``."""
        modulation = None if self.time is None else self.time(t)
        return self.reshape.inverse(self.transformer(self.reshape(h), modulation))


# ---------------------------------------------------------------------------------------------------------------
# s_W: the score network


class Orthonormal(nn.Module):
    """Parametrisation by the Q factor: whatever the optimiser does, the columns stay orthonormal."""

    def forward(self, W: Float[Tensor, "D d0"]) -> Float[Tensor, "D d0"]:
        """An orthonormal basis of the span of W."""
        return orthonormalise(W)

    def right_inverse(self, W: Float[Tensor, "D d0"]) -> Float[Tensor, "D d0"]:
        """Orthonormal columns are their own Q factor."""
        return W


def assemble(
    x: Float[Tensor, "*batch D"], decoded: Float[Tensor, "*batch D"], sigma: Float[Tensor, "*#batch 1"]
) -> Float[Tensor, "*batch D"]:
    """``W_B f / sigma - x / sigma``; sigma is the variance, which enters to the first power in both terms."""
    return decoded / sigma - x / sigma


class ScoreNetwork(nn.Module):
    """The score network ``s_W(x, t) = W_B f(W_B' x, t) / sigma(t) - x / sigma(t)``.

    With ``W_B = B`` and ``f = q`` it is the exact score of ``x = B h``. The size of f depends on d0 only.

    :param W_B: (D, d0), orthonormal columns; the network follows its dtype and device.
    :param f: latent network, ``f(h, t)`` of the shape of h: a ``LatentTransformer`` or any callable. t arrives as a
        tensor broadcastable to the batch.
    :param T0: smallest time, T0 > 0.
    :param T: largest time.
    :param train_basis: make ``W_B`` a parameter, kept orthonormal at every step; otherwise it stays as given.
    :param process: forward process that gives sigma(t); None is w = 1.
    :raises ValueError: ``W_B`` not orthonormal (1e-5 in float32, 1e-10 in float64) or wider than tall, f made
        for another d0, not 0 < T0 < T; in a call, t outside [T0, T] or f returning another shape.

    Source: Equation 2.5, Definition 3.3
    """

    @typed
    def __init__(
        self,
        W_B: Float[Tensor, "D d0"],
        f: Callable,
        T0: float,
        T: float,
        train_basis: bool = False,
        process: ForwardProcess | None = None,
    ):
        super().__init__()
        if not 0 < T0 < T:
            raise ValueError(f"the times need 0 < T0 < T, got T0 = {T0} and T = {T}")
        require_orthonormal("W_B", W_B)
        self.D, self.d0 = W_B.shape
        if getattr(f, "d0", self.d0) != self.d0:
            raise ValueError(f"f must take d0 = {self.d0} numbers, the columns of W_B, but its d0 = d L = {f.d0}")
        self.f, self.T0, self.T, self.process = f, T0, T, process or ForwardProcess()
        if train_basis:
            self.W_B = nn.Parameter(W_B.detach().clone())
            parametrize.register_parametrization(self, "W_B", Orthonormal())
        else:
            self.register_buffer("W_B", W_B.detach().clone())

    def forward(self, x: Float[Tensor, "*batch D"], t: Time) -> Float[Tensor, "*batch D"]:
        """Points ``(..., D)`` at times t to scores ``(..., D)``; t is a number or broadcastable to ``(...)``."""
        W_B = self.W_B
        _require_shape("x", x, D=self.D)
        require_dtype("x", x, W_B.dtype, "W_B")
        t = as_time(t, x, positive=True)
        # Rounding T0 and T to the precision of t is not the caller's fault.
        slack = 4 * torch.finfo(t.dtype).eps
        inside = (t >= self.T0 * (1 - slack)) & (t <= self.T * (1 + slack))
        require_time(t, f"T0 <= t <= T with T0 = {self.T0} and T = {self.T}", inside)
        h = x @ W_B
        f = self.f(h, t)
        if f.shape != h.shape:
            raise ValueError(f"f must return the shape of its input h, {tuple(h.shape)}, got {tuple(f.shape)}")
        return assemble(x, f @ W_B.mT, self.process.sigma(t)[..., None])


# ---------------------------------------------------------------------------------------------------------------
# Definition 3.2: the constants of a network


@typed
def norm_profile(network: Transformer, C_X: float) -> NormProfile:
    """The smallest weight constants of Definition 3.2 that hold for a network, largest over blocks and heads.

    ``norm(Z)_{2,inf}`` is the largest Euclidean norm of a column of Z in the paper's orientation; Z is ``W_OV'``,
    ``W_KQ``, ``W_1``, ``W_2`` and ``E'``, so C_E belongs to a *row* of the paper's d x L matrix E. Biases have no
    constant in the definition. C_T and L_T are ``output_bound`` and ``lipschitz_bound``.

    :param C_X: bound on the Euclidean norm of every input token.
    :raises ValueError: C_X negative or not finite.

    Source: Definition 3.2
    """
    _check_radius(C_X)
    attention = [block.attention for block in network.blocks]
    ff = [W.detach() for block in network.blocks for W in (block.feed_forward.W_1, block.feed_forward.W_2)]
    W_OV = torch.cat([layer.W_OV.detach() for layer in attention])
    W_KQ = torch.cat([layer.W_KQ.detach() for layer in attention])
    heads, head_size, d = attention[0].W_Q.shape
    return NormProfile(
        blocks=len(attention),
        d=d,
        heads=heads,
        head_size=head_size,
        C_OV=_spectral(W_OV).max().item(),
        C_OV_2inf=_largest_column(W_OV.mT),
        C_KQ=_spectral(W_KQ).max().item(),
        C_KQ_2inf=_largest_column(W_KQ),
        C_F=max(_spectral(W).item() for W in ff),
        C_F_2inf=max(_largest_column(W) for W in ff),
        # Stored with tokens as rows, E is the paper's E' already.
        C_E=_largest_column(network.E.detach()),
        C_X=float(C_X),
    )


@typed
def output_bound(network: Transformer, C_X: float) -> float:
    """C_T: a bound on the Frobenius norm of f_T(X) when every token of X has norm at most C_X.

    Attention averages tokens, so a token of norm R leaves it with norm at most R (1 + sum_i norm(W_OV^i)_2);
    the feed-forward layer is a Lipschitz map whose value at 0 is known. Definition 3.2 asks for a bound over all
    X; a network with skip connections has one only if its layers cancel the skip.

    :raises ValueError: C_X negative or not finite.

    Source: Definition 3.2
    """
    _check_radius(C_X)
    return math.sqrt(network.L) * token_radii(network, C_X)[-1]


@typed
def lipschitz_bound(network: Transformer, C_X: float) -> float:
    """L_T: a bound on the Frobenius Lipschitz constant of f_T on the set where every token has norm at most C_X.

    The product over the layers of ``attention_lipschitz`` and ``1 + norm(W_2)_2 norm(W_1)_2``. No constant is
    valid for all X: the slope of attention grows with the square of the tokens' norms.

    :raises ValueError: C_X negative or not finite.

    Source: Definition 3.2
    """
    _check_radius(C_X)
    slope = 1.0
    for block, R in zip(network.blocks, token_radii(network, C_X)[:-1], strict=True):
        slope *= attention_lipschitz(block.attention, network.L, R) * feed_forward_lipschitz(block.feed_forward)
    return slope


def token_radii(network: Transformer, C_X: float) -> list[float]:
    """Bounds on the token norms in front of every block, and behind the last."""
    radii = [C_X + _largest_column(network.E.detach().mT)]
    for block in network.blocks:
        R = radii[-1] * (1 + _spectral(block.attention.W_OV.detach()).sum().item())
        at_zero = block.feed_forward(torch.zeros_like(network.E[0])).detach().norm().item()
        radii.append(at_zero + feed_forward_lipschitz(block.feed_forward) * R)
    return radii


def feed_forward_lipschitz(layer: FeedForward) -> float:
    """``1 + norm(W_2)_2 norm(W_1)_2``: ReLU is 1-Lipschitz."""
    return 1 + (_spectral(layer.W_2.detach()) * _spectral(layer.W_1.detach())).item()


def attention_lipschitz(layer: Attention, L: int, R: float) -> float:
    """A Frobenius Lipschitz constant of an attention layer on L tokens of norm at most R.

    ``1 + sum_i norm(W_OV^i)_2 [sqrt(L) (1 + R (R norm(W_KQ^i)_2 + norm(W_K^i' b_Q^i))) + R^2 norm(W_KQ^i)_2]``.
    The three terms belong to the values, the keys and the query; the proof is in the chapter on the score network.
    """
    OV, KQ = _spectral(layer.W_OV.detach()), _spectral(layer.W_KQ.detach())
    tilt = 0 if layer.b_Q is None else torch.einsum("hmd,hm->hd", layer.W_K, layer.b_Q).detach().norm(dim=-1)
    return 1 + (OV * (math.sqrt(L) * (1 + R * (R * KQ + tilt)) + R**2 * KQ)).sum().item()


@typed
def lipschitz_estimate(network: Transformer, X: Float[Tensor, "n {network.L} {network.d}"]) -> float:
    """The largest spectral norm of the Jacobian of f_T at the given points: L_T from below.

    On a convex set the Lipschitz constant is the supremum of that norm, so no estimate from points of the set
    exceeds a valid bound for it.

    :param X: points; memory grows with n (d L)^2.

    Source: Definition 3.2
    """
    size = network.L * network.d
    # One copy of each point per output entry, so that a single backward pass gives whole Jacobians.
    copies = X.detach().repeat_interleave(size, 0).requires_grad_()
    picks = torch.eye(size, dtype=X.dtype, device=X.device).repeat(len(X), 1)
    (rows,) = torch.autograd.grad(network(copies).flatten(1), copies, picks)
    return _spectral(rows.reshape(-1, size, size)).max().item()


# ---------------------------------------------------------------------------------------------------------------


def _weight(shape: tuple[int, ...], fan_in: int, generator: torch.Generator, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(gain / math.sqrt(fan_in) * torch.randn(shape, generator=generator, device=generator.device))


def _spectral(W: Float[Tensor, "*batch a b"]) -> Float[Tensor, "*batch"]:
    return torch.linalg.matrix_norm(W, ord=2)


def _largest_column(W: Float[Tensor, "*batch a b"]) -> float:
    return W.norm(dim=-2).max().item()


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")


def _require_shape(name: str, value: Tensor, **sizes: int) -> None:
    if value.shape[-len(sizes) :] != tuple(sizes.values()):
        expected = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
        raise ValueError(f"{name} must have shape (..., {expected}), got {tuple(value.shape)}")


def _check_radius(C_X: float) -> None:
    if not 0 <= C_X < math.inf:
        raise ValueError(f"C_X must be a finite norm, at least 0, got {C_X}")
