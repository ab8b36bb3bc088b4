"""The diffusion of Section 2.1 and Appendix D.1: forward process, denoising loss, discretised backward process.

``sigma(t)`` is a *variance*. A time ``t`` is an int, a float or a tensor; a tensor is 0-d or broadcasts to the batch
shape of the data, which are rows ``(..., D)``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ditbook.inputs import require_dtype, typed

Time = int | float | Shaped[Tensor, "..."]
Score = Callable[[Tensor, Time], Tensor]

# Gauss-Legendre nodes on [0, 1]: exact for a weight that is a polynomial of degree up to 63.
_NODES, _WEIGHTS = (torch.from_numpy(array) / 2 for array in np.polynomial.legendre.leggauss(32))
_NODES = _NODES + 0.5


@dataclass(frozen=True)
class ForwardProcess:
    """dx = -w(t) x dt / 2 + sqrt(w(t)) dW: given x_0, the law of x_t is N(beta(t) x_0, sigma(t) I).

    Source: Equation D.1

    :param weight: w, a smooth positive nondecreasing function that maps a tensor of times to a tensor of the same
        shape; None is w = 1, the choice of Section 2.2, with beta(t) = exp(-t/2) and sigma(t) = 1 - exp(-t).
    """

    weight: Callable[[Tensor], Tensor] | None = None

    @typed
    def clock(self, t: Time) -> Float[Tensor, "..."]:
        """The integral of w from 0 to t, by Gauss-Legendre quadrature (32 nodes; a w with jumps loses accuracy).

        w only changes the clock: the noise at time t is that of w = 1 at time ``clock(t)``.

        :param t: times, t >= 0. A number gives a 0-d float64 tensor, a tensor keeps its shape, dtype and device.
        :raises ValueError: t is negative or NaN; the weight is not positive, decreases, or changes the shape.
        """
        t = t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64)
        require_time(t, "t >= 0", t >= 0)
        t = t if t.is_floating_point() else t.to(torch.get_default_dtype())
        if self.weight is None:
            return t
        times = t[..., None] * _NODES.to(t)
        w = self.weight(times)
        if w.shape != times.shape:
            raise ValueError(f"weight must keep the shape {tuple(times.shape)} of its times, got {tuple(w.shape)}")
        slack = 8 * torch.finfo(w.dtype).eps * w.abs()[..., 1:]
        if not (w > 0).all() or not (w.diff(dim=-1) >= -slack).all():
            raise ValueError(f"weight must be positive and nondecreasing on [0, t], got values {w.min()} to {w.max()}")
        return t * (w * _WEIGHTS.to(t)).sum(-1)

    def beta(self, t: Time) -> Tensor:
        """exp(-clock(t) / 2), the factor that shrinks x_0; see `clock` for shape, dtype and errors."""
        return torch.exp(-self.clock(t) / 2)

    def sigma(self, t: Time) -> Tensor:
        """1 - beta(t)^2, the variance of each coordinate of x_t given x_0; see `clock` for shape, dtype and errors."""
        return -torch.expm1(-self.clock(t))

    @typed
    def perturb(
        self, x0: Float[Tensor, "*batch D"], t: Time, *, generator: torch.Generator
    ) -> Float[Tensor, "*batch D"]:
        """Draw x_t given x_0.

        :raises ValueError: t is negative, of another dtype, or does not broadcast to the batch shape.
        """
        t = as_time(t, x0)[..., None]
        noise = torch.randn(x0.shape, generator=generator, dtype=x0.dtype, device=x0.device)
        return self.beta(t) * x0 + self.sigma(t).sqrt() * noise

    @typed
    def transition_score(
        self, x0: Float[Tensor, "*batch D"], t: Time, xt: Float[Tensor, "*batch D"]
    ) -> Float[Tensor, "*batch D"]:
        """(beta(t) x_0 - x_t) / sigma(t), the gradient in x_t of the log density of x_t given x_0.

        Source: Equation 2.1

        :raises ValueError: t <= 0, where sigma vanishes; mixed dtypes; t does not broadcast to the batch shape.
        """
        require_dtype("xt", xt, x0.dtype, "x0")
        t = as_time(t, x0, positive=True)[..., None]
        return (self.beta(t) * x0 - xt) / self.sigma(t)


@typed
def denoising_loss(
    score: Score, x0: Float[Tensor, "*batch D"], t: Time, xt: Float[Tensor, "*batch D"], process: ForwardProcess
) -> Float[Tensor, ""]:
    """Batch mean of norm(score(x_t, t) - (beta x_0 - x_t) / sigma)^2: equation 2.1 with weight 1, one draw per row.

    Equation 2.2 prints x_0 as the regression target; see erratum 16.

    Source: Equation 2.1, Equation 2.2

    :param score: called as ``score(xt, t)``, returns the shape of ``xt``.
    :raises ValueError: t <= 0, mixed dtypes, t that does not broadcast, or a score of another shape.
    """
    target = process.transition_score(x0, t, xt)
    return (_evaluate(score, xt, t) - target).square().sum(-1).mean()


def backward_drift(y: Tensor, s: Tensor) -> Tensor:
    """y / 2 + s, the drift of the backward process per unit of the clock.

    Source: Equation D.2
    """
    return y / 2 + s


@typed
@torch.no_grad()
def sample_backward(
    score: Score,
    process: ForwardProcess,
    shape: Sequence[int],
    T: int | float,
    T0: int | float,
    step: int | float,
    *,
    generator: torch.Generator,
) -> Float[Tensor, "..."]:
    """Run the discretised backward process from N(0, I) at time T down to T0.

    On each [k step, (k + 1) step] y and the score stay as they were at its start, while w is integrated: with
    a = clock(T - k step) - clock(T - (k + 1) step), y moves by a (y / 2 + s) plus Gaussian noise of variance a.
    The score is asked for at the times T, T - step, ..., T0 + step (floats), never at T0 itself.

    Source: Equation D.3, Equation D.4

    :param score: called as ``score(y, t)``, returns the shape of ``y``.
    :param shape: shape of the sample, last axis D; dtype is torch's default, the device is the generator's.
    :param step: mu > 0; must divide T - T0 (to 1e-9 of a step). Nothing is rounded silently: otherwise the error
        names the nearest steps that do.
    :raises ValueError: not 0 <= T0 < T, a step that is not positive or does not divide, or a score of another shape.
    """
    steps = count_steps(T, T0, step)
    times = [T - k * step for k in range(steps)] + [T0]
    y = torch.randn(tuple(shape), generator=generator, device=generator.device)
    for t, after in pairwise(times):
        advance = (process.clock(t) - process.clock(after)).item()
        noise = torch.randn(y.shape, generator=generator, dtype=y.dtype, device=y.device)
        y = y + advance * backward_drift(y, _evaluate(score, y, t)) + advance**0.5 * noise
    return y


def count_steps(T: float, T0: float, step: float) -> int:
    """Number of steps of that size from T down to T0.

    :raises ValueError: not 0 <= T0 < T < infinity, step <= 0, or a step that does not divide T - T0.
    """
    if not 0 <= T0 < T < float("inf"):
        raise ValueError(f"T0 and T must satisfy 0 <= T0 < T, got T0 = {T0}, T = {T}")
    if not step > 0:
        raise ValueError(f"step must be positive, got {step}")
    exact = (T - T0) / step
    steps = round(exact)
    if steps < 1 or abs(exact - steps) > 1e-9 * max(steps, 1):
        below, above = max(int(exact), 1), int(exact) + 1
        raise ValueError(
            f"step must divide T - T0 = {T - T0:.12g}, got {step}, which makes {exact:.6g} steps; use "
            f"(T - T0) / {below} = {(T - T0) / below:.12g} or (T - T0) / {above} = {(T - T0) / above:.12g}"
        )
    return steps


def as_time(t: Time, x: Tensor, positive: bool = False) -> Tensor:
    """``t`` with the dtype and device of the rows ``x``, checked: t >= 0 (or t > 0), broadcasting to the batch shape.

    :raises ValueError: one of the checks fails; a batch of times of another floating dtype than ``x``.
    """
    if isinstance(t, Tensor) and t.ndim > 0 and t.is_floating_point():
        require_dtype("t", t, x.dtype, "the data")
    t = torch.as_tensor(t, dtype=x.dtype, device=x.device)
    require_time(t, "t > 0" if positive else "t >= 0", t > 0 if positive else t >= 0)
    batch = x.shape[:-1]
    # Alignment from the right, as in broadcasting: t may be smaller than the batch shape, never larger.
    if t.ndim > len(batch) or any(n not in (1, m) for n, m in zip(t.shape[::-1], batch[::-1], strict=False)):
        raise ValueError(f"t must broadcast to the batch shape {tuple(batch)}, got shape {tuple(t.shape)}")
    return t


def require_time(t: Tensor, condition: str, holds: Tensor) -> None:
    if not holds.all():
        raise ValueError(f"t must satisfy {condition}, got {t[~holds].flatten()[0].item():.6g}")


def _evaluate(score: Score, x: Tensor, t: Time) -> Tensor:
    s = score(x, t)
    # A score of shape (n,) or (n, 1) would broadcast against (n, D) without a word.
    if s.shape != x.shape:
        raise ValueError(f"score must return the shape {tuple(x.shape)} of its input, got {tuple(s.shape)}")
    return s
