"""Laws on a linear subspace, and the score decomposition of Section 2.2, exact for Gaussian-mixture latents.

w = 1 throughout, so beta(t) = exp(-t/2) and the variance is sigma(t) = 1 - exp(-t); another weight only changes the
clock (`ditbook.diffusion.ForwardProcess.clock`). Latent points are rows ``(..., d0)``, data are rows ``(..., D)``.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ditbook.diffusion import ForwardProcess, Time, as_time
from ditbook.inputs import require_dtype, typed

PROCESS = ForwardProcess()


@typed
def random_subspace(D: int, d0: int, *, generator: torch.Generator) -> Float[Tensor, "D d0"]:
    """Orthonormal basis of a uniformly distributed d0-dimensional subspace of R^D, in torch's default dtype.

    Source: Assumption 2.1

    :raises ValueError: not 1 <= d0 <= D.
    """
    if not 1 <= d0 <= D:
        raise ValueError(f"d0 must satisfy 1 <= d0 <= D, got d0 = {d0}, D = {D}")
    # The signs of orthonormalise make the distribution independent of the conventions of the QR routine.
    return orthonormalise(torch.randn(D, d0, generator=generator, device=generator.device))


@typed
@dataclass(frozen=True, eq=False)
class GaussianMixture:
    """The latent law p_h = sum_k weights_k N(means_k, covariances_k) and its noised versions p^h_t.

    p^h_t is the mixture of N(beta means_k, beta^2 covariances_k + sigma I), so everything below is in closed form.
    Times are t >= 0; at t = 0 the functions are those of p_h itself.

    Source: Lemma 2.1

    :param weights: nonnegative, sum one, shape (k,).
    :param means: shape (k, d0).
    :param covariances: symmetric positive definite, shape (k, d0, d0).
    :raises ValueError: the mixture is empty or not finite, dtypes are mixed, weights do not sum to one, or a covariance
        is not symmetric positive definite.
    """

    weights: Float[Tensor, "k"]
    means: Float[Tensor, "k d0"]
    covariances: Float[Tensor, "k d0 d0"]

    def __post_init__(self):
        if self.means.numel() == 0:
            raise ValueError(f"means must hold at least one component, got shape {tuple(self.means.shape)}")
        for name in ("means", "covariances"):
            require_dtype(name, getattr(self, name), self.weights.dtype, "weights")
        for name in ("weights", "means", "covariances"):
            if not getattr(self, name).isfinite().all():
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        close = tolerance(self.weights.dtype)
        if (self.weights < 0).any() or abs(self.weights.sum() - 1) > close:
            raise ValueError(f"weights must be nonnegative with sum 1, got {self.weights} of sum {self.weights.sum()}")
        scale = self.covariances.abs().amax((-2, -1), keepdim=True)
        if ((self.covariances - self.covariances.mT).abs() > close * scale).any():
            raise ValueError("covariances must be symmetric, got a component that is not")
        smallest, largest = self._axes[0].aminmax(dim=-1)
        if (smallest <= self.dimension * torch.finfo(self.weights.dtype).eps * largest).any():
            raise ValueError(f"covariances must be positive definite, got smallest eigenvalues {smallest}")

    @property
    def dimension(self) -> int:
        """d0."""
        return self.means.shape[-1]

    @cached_property
    def _axes(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (k, d0) and eigenvectors (k, d0, d0) of the covariances: the axes of p^h_t for every t."""
        return torch.linalg.eigh(self.covariances)

    @typed
    def sample(self, n: int, *, generator: torch.Generator) -> Float[Tensor, "n d0"]:
        """Draw n latent points h."""
        component = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        h = torch.randn(n, self.dimension, generator=generator, dtype=self.means.dtype, device=self.means.device)
        variances, axes = self._axes
        for k, mean in enumerate(self.means):
            chosen = component == k
            h[chosen] = mean + (h[chosen] * variances[k].sqrt()) @ axes[k].mT
        return h

    @typed
    def log_density(self, h: Float[Tensor, "*batch d0"], t: Time) -> Float[Tensor, "*batch"]:
        """log p^h_t(h)."""
        return self._along_axes(h, t)[0].logsumexp(-1)

    @typed
    def score(self, h: Float[Tensor, "*batch d0"], t: Time) -> Float[Tensor, "*batch d0"]:
        """The gradient of log p^h_t at h: each component's own score, averaged with its responsibility for h."""
        log_joint, residual, variance = self._along_axes(h, t)
        pull = log_joint.softmax(-1)[..., None] * residual / variance
        return -torch.einsum("kde,...ke->...d", self._axes[1], pull)

    @typed
    def score_jacobian(self, h: Float[Tensor, "*batch d0"], t: Time) -> Float[Tensor, "*batch d0 d0"]:
        """The Hessian of log p^h_t at h: minus the mean precision plus the covariance of the components' scores.

        Its largest norm over h is the Lipschitz constant of s_+ at t.

        Source: Assumption 2.3
        """
        log_joint, residual, variance = self._along_axes(h, t)
        share, axes = log_joint.softmax(-1), self._axes[1]
        scores = -torch.einsum("kde,...ke->...kd", axes, residual / variance)
        precision = torch.einsum("kde,kfe,...ke->...df", axes, axes, share[..., None] / variance)
        deviations = scores - torch.einsum("...k,...kd->...d", share, scores)[..., None, :]
        return torch.einsum("...k,...kd,...kf->...df", share, deviations, deviations) - precision

    @typed
    def posterior_mean(self, h: Float[Tensor, "*batch d0"], t: Time) -> Float[Tensor, "*batch d0"]:
        """E[latent | its noised version at t is h], component by component (regression of one Gaussian on another)."""
        log_joint, residual, variance = self._along_axes(h, t)
        gain = PROCESS.beta(as_time(t, h))[..., None, None] * self._axes[0] / variance
        regression = self.means + torch.einsum("kde,...ke->...kd", self._axes[1], gain * residual)
        return torch.einsum("...k,...kd->...d", log_joint.softmax(-1), regression)

    @typed
    def q(self, h: Float[Tensor, "*batch d0"], t: Time) -> Float[Tensor, "*batch d0"]:
        """sigma(t) grad log p^h_t(h) + h, which equals beta(t) times `posterior_mean`.

        Source: Equation 2.4
        """
        return PROCESS.sigma(as_time(t, h))[..., None] * self.score(h, t) + h

    def tail_constants(self) -> tuple[float, float, float]:
        """(A0, A1, A2) with p_h(h) <= (2 pi)^(-d0/2) A1 exp(-A2 norm(h)^2 / 2) whenever norm(h) >= A0.

        From norm(h - mean) >= norm(h) / 2 outside twice the largest mean (1 is returned when all means are zero).

        Source: Assumption 2.2
        """
        variances = self._axes[0]
        A0 = 2 * self.means.norm(dim=-1).max().item() or 1.0
        A1 = (self.weights / variances.prod(-1).sqrt()).sum().item()
        return A0, A1, 0.25 / variances.max().item()

    def lipschitz_bound(self) -> float:
        """A bound on the Lipschitz constant of s+(., t) for every t >= 0; the components must share one covariance.

        The Hessian of log p^h_t lies between -P and beta^2 P Cov P, where P is the precision at t and Cov a
        covariance of means, whose variance along any direction is at most a quarter of the squared range.

        Source: Assumption 2.3

        :raises ValueError: the covariances differ: then s_+ need not be Lipschitz at all.
        """
        spread = (self.covariances - self.covariances[0]).abs().max()
        if spread > tolerance(self.means.dtype) * self.covariances.abs().max():
            raise ValueError("covariances must be equal for a Lipschitz bound, got different ones")
        variances, axes = (part[0] for part in self._axes)
        # max over u = beta^2 in [0, 1] of u / (1 + u (variance - 1))^2, axis by axis.
        largest = torch.where(variances <= 2, variances**-2, 0.25 / (variances - 1).clamp(min=1))
        gaps = (self.means[:, None] - self.means) @ axes
        return max(1.0, 1 / variances.min().item(), (gaps.square() @ largest).max().item() / 4)

    def _along_axes(self, h: Tensor, t: Time) -> tuple[Tensor, Tensor, Tensor]:
        """log(weight_k N_k(h)) of shape (..., k); residuals along the axes and their variances, both (..., k, d0)."""
        require_dtype("h", h, self.means.dtype, "means")
        if h.shape[-1] != self.dimension:
            raise ValueError(f"h must have d0 = {self.dimension} columns, got shape {tuple(h.shape)}")
        t = as_time(t, h)[..., None, None]
        variances, axes = self._axes
        variance = PROCESS.beta(t) ** 2 * variances + PROCESS.sigma(t)
        centres = torch.einsum("kde,kd->ke", axes, self.means)
        residual = torch.einsum("kde,...d->...ke", axes, h) - PROCESS.beta(t) * centres
        log_normal = -0.5 * ((residual.square() / variance).sum(-1) + torch.log(2 * math.pi * variance).sum(-1))
        return self.weights.log() + log_normal, residual, variance


@typed
@dataclass(frozen=True, eq=False)
class SubspaceLaw:
    """The law of x = B h with h from the latent law, and of its noised versions p_t in R^D, for t > 0.

    Source: Assumption 2.1, Lemma 2.1

    :param basis: B, orthonormal columns (to 1e-10 in float64, 1e-5 in float32), shape (D, d0).
    :raises ValueError: the basis is not orthonormal; dimension or dtype of ``latent`` does not fit.
    """

    basis: Float[Tensor, "D d0"]
    latent: GaussianMixture

    def __post_init__(self):
        require_orthonormal("basis", self.basis)
        if self.latent.dimension != self.basis.shape[1]:
            raise ValueError(f"latent must have dimension {self.basis.shape[1]}, got {self.latent.dimension}")
        require_dtype("latent", self.latent.means, self.basis.dtype, "basis")

    @typed
    def sample(self, n: int, *, generator: torch.Generator) -> Float[Tensor, "n D"]:
        """Draw n clean data points x = B h."""
        return self.latent.sample(n, generator=generator) @ self.basis.mT

    @typed
    def log_density(self, x: Float[Tensor, "*batch D"], t: Time) -> Float[Tensor, "*batch"]:
        """log p_t(x): p^h_t along the subspace times N(0, sigma I) across it."""
        h, across, sigma = self._split(x, t)
        codimension = self.basis.shape[0] - self.basis.shape[1]
        log_normal = -0.5 * (across.square().sum(-1) / sigma + codimension * torch.log(2 * math.pi * sigma))
        return self.latent.log_density(h, t) + log_normal

    @typed
    def score(self, x: Float[Tensor, "*batch D"], t: Time) -> Float[Tensor, "*batch D"]:
        """The gradient of log p_t at x: s+ + s-.

        Source: Lemma 2.1
        """
        return self.on_support_score(x, t) + self.orthogonal_score(x, t)

    @typed
    def on_support_score(self, x: Float[Tensor, "*batch D"], t: Time) -> Float[Tensor, "*batch D"]:
        """s+ = B grad log p^h_t(B'x), a vector of span(B)."""
        h, _, _ = self._split(x, t)
        return self.latent.score(h, t) @ self.basis.mT

    @typed
    def orthogonal_score(self, x: Float[Tensor, "*batch D"], t: Time) -> Float[Tensor, "*batch D"]:
        """s- = -(I - BB') x / sigma(t): it pulls back to the subspace and knows nothing of the latent law."""
        _, across, sigma = self._split(x, t)
        return -across / sigma[..., None]

    def _split(self, x: Tensor, t: Time) -> tuple[Tensor, Tensor, Tensor]:
        """B'x of shape (..., d0), (I - BB')x of shape (..., D), and sigma(t) > 0."""
        require_dtype("x", x, self.basis.dtype, "basis")
        if x.shape[-1] != self.basis.shape[0]:
            raise ValueError(f"x must have D = {self.basis.shape[0]} columns, got shape {tuple(x.shape)}")
        h = x @ self.basis
        return h, x - h @ self.basis.mT, PROCESS.sigma(as_time(t, x, positive=True))


def orthonormalise(W: Float[Tensor, "*batch D d0"]) -> Float[Tensor, "*batch D d0"]:
    """Orthonormal basis of the span of the columns: the Q factor with a positive diagonal of R.

    Columns that are orthonormal already come back as they are.
    """
    Q, R = torch.linalg.qr(W)
    return Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def require_orthonormal(name: str, basis: Tensor) -> None:
    """:raises ValueError: the columns are not orthonormal to `tolerance`."""
    gram = basis.mT @ basis
    gap = (gram - torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)).abs().max()
    if not gap <= tolerance(basis.dtype):
        raise ValueError(
            f"{name} must have orthonormal columns to {tolerance(basis.dtype):.0e}, "
            f"got shape {tuple(basis.shape)} with largest entry of B'B - I equal to {gap:.3g}"
        )


def tolerance(dtype: torch.dtype) -> float:
    """How exactly orthonormality, weights and symmetry are asked for: 1e-10 in float64, 1e-5 below."""
    return 1e-10 if dtype == torch.float64 else 1e-5
