"""Estimation from samples (Section 3.3, Appendix F.3): train score networks, and measure what they have learned.

Many networks of one architecture are trained at once: their parameters are stacked along a first axis, ``members``,
and one batched call evaluates them all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ditbook.diffusion import ForwardProcess, Score, Time, as_time
from ditbook.inputs import typed
from ditbook.subspace import orthonormalise
from ditbook.transformer import ScoreNetwork, assemble

BASIS = "parametrizations.W_B.original"


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Score networks of one architecture, evaluated together: a score for arrays ``(members, n, D)``.

    :param network: the architecture; its own parameters are not used.
    :param parameters: trainable tensors, each with a first axis ``members``.
    :param buffers: fixed tensors, likewise.

    Source: Definition 3.3
    """

    network: ScoreNetwork
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, networks: Sequence[ScoreNetwork]) -> "Ensemble":
        """Copy the parameters of networks of one architecture.

        :raises ValueError: the networks' tensors differ in name or shape.
        """
        parameters = _stack([dict(network.named_parameters()) for network in networks])
        buffers = _stack([dict(network.named_buffers()) for network in networks])
        return cls(networks[0], {name: W.requires_grad_() for name, W in parameters.items()}, buffers)

    def __len__(self) -> int:
        return len(next(iter(self.parameters.values())))

    def __getitem__(self, members: slice | Sequence[int] | Tensor) -> "Ensemble":
        """The ensemble of some of the members."""
        groups = ({name: W[members] for name, W in group.items()} for group in (self.parameters, self.buffers))
        return Ensemble(self.network, *groups)

    @property
    def basis(self) -> Float[Tensor, "members D d0"]:
        """W_B of every member, orthonormal columns."""
        return orthonormalise(self.parameters[BASIS]) if BASIS in self.parameters else self.buffers["W_B"]

    def __call__(self, x: Float[Tensor, "members n D"], t: Time) -> Float[Tensor, "members n D"]:
        """Scores; rows ``(n, D)`` are shown to every member. t is a number or broadcasts to ``(members, n)``."""
        W_B = self.basis
        x = x.expand(len(W_B), -1, -1)
        t = as_time(t, x, positive=True).expand(x.shape[:-1])
        decoded = self.latent(x @ W_B, t) @ W_B.mT
        return assemble(x, decoded, self.network.process.sigma(t)[..., None])

    def latent(self, h: Float[Tensor, "members n d0"], t: Float[Tensor, "members n"]) -> Float[Tensor, "members n d0"]:
        """f(h, t) of every member."""
        state = [{k[2:]: v for k, v in group.items() if k[:2] == "f."} for group in (self.parameters, self.buffers)]
        # The fused attention kernel has no batching rule.
        with sdpa_kernel(SDPBackend.MATH):
            return vmap(lambda p, b, h, t: functional_call(self.network.f, (p, b), (h, t)))(*state, h, t)


def _stack(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    shapes = [{name: tuple(W.shape) for name, W in state.items()} for state in states]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError("networks must have one architecture, got tensors of different names or shapes")
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


@typed
def fit(
    networks: Sequence[ScoreNetwork],
    data: Sequence[Float[Tensor, "_ D"]],
    *,
    steps: int,
    batch: int = 64,
    rate: float = 1e-2,
    fresh: bool = True,
    generator: torch.Generator,
) -> tuple[Ensemble, Float[Tensor, "steps members"]]:
    """Train each network on its own sample, all of them together, by Adam on the denoising loss.

    The paper's empirical loss (2.2) draws one time and one noise for each sample point, once and for all
    (``fresh=False``). In practice both are drawn anew whenever a point is used (``fresh=True``). Times are uniform
    on [T0, T], minibatches are drawn with replacement, and the rate falls to zero along a cosine.

    :param networks: of one architecture; T0 and T may differ. They are left unchanged.
    :param data: for each network its sample ``(n, D)``; the sizes n may differ.
    :param batch: sample points of each member in each step.
    :param rate: learning rate of the first step.
    :return: the trained networks, and the training loss of every step and member.
    :raises ValueError: no networks, another number of samples than of networks, or a sample with n = 0.

    Source: Equation 2.2, Theorem 3.2
    """
    if not networks or len(networks) != len(data):
        raise ValueError(f"data must hold one sample for each network, got {len(data)} for {len(networks)} networks")
    ensemble = Ensemble.of(networks)
    draw = _minibatches(networks, data, fresh, generator)
    optimiser = torch.optim.Adam(ensemble.parameters.values(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    losses = []
    for _ in range(steps):
        loss = member_losses(ensemble, *draw(batch))
        optimiser.zero_grad()
        # Adam works entry by entry, so the sum trains every member as if it were alone.
        loss.sum().backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.detach())
    return ensemble, torch.stack(losses)


def member_losses(
    ensemble: Ensemble,
    x0: Float[Tensor, "members n D"],
    t: Float[Tensor, "members n"],
    xt: Float[Tensor, "members n D"],
) -> Float[Tensor, "members"]:
    """The denoising loss of every member, see `ditbook.diffusion.denoising_loss`."""
    target = ensemble.network.process.transition_score(x0, t, xt)
    return squared_distance(ensemble(xt, t), target).mean(-1)


def squared_distance(s: Float[Tensor, "*batch D"], target: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch"]:
    """Squared Euclidean distance of each row."""
    return (s - target).square().sum(-1)


def _minibatches(networks: Sequence, data: Sequence[Tensor], fresh: bool, generator: torch.Generator) -> Callable:
    """A function of the batch size that draws ``x0, t, xt``, each with the axes ``(members, batch)`` first."""
    sizes = torch.tensor([len(sample) for sample in data])
    if (sizes < 1).any():
        raise ValueError(f"every sample must have n >= 1 points, got sizes {sizes.tolist()}")
    pool, first = torch.cat(list(data)), sizes.cumsum(0) - sizes
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    T0, T = (torch.tensor([getattr(n, end) for n in networks], dtype=pool.dtype) for end in ("T0", "T"))

    def perturb(index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x0, member = pool[index], owner[index]
        uniform = torch.rand(index.shape, generator=generator, dtype=pool.dtype)
        t = T0[member] + (T - T0)[member] * uniform
        return x0, t, networks[0].process.perturb(x0, t, generator=generator)

    once = None if fresh else perturb(torch.arange(len(pool)))

    def draw(batch: int) -> tuple[Tensor, Tensor, Tensor]:
        uniform = torch.rand(len(sizes), batch, generator=generator, dtype=torch.float64)
        index = first[:, None] + (uniform * sizes[:, None]).long()
        return perturb(index) if once is None else tuple(part[index] for part in once)

    return draw


@typed
@torch.no_grad()
def error_curve(
    score: Score, law, times: Float[Tensor, "times"], *, samples: int = 2000, generator: torch.Generator
) -> Float[Tensor, "*members times"]:
    """E norm(score(x_t, t) - grad log p_t(x_t))^2 at each time: the *squared* L2(P_t) error, by Monte Carlo.

    :param score: called as ``score(x, t)`` with x of shape ``(samples, D)``; an ``Ensemble`` gives one row a member.
    :param law: knows its exact score: ``.sample(n, generator=)`` and ``.score(x, t)``, as a ``SubspaceLaw`` does.
    :raises ValueError: ``law`` has no exact score (data from the world have none).
    """
    for name in ("sample", "score"):
        if not callable(getattr(law, name, None)):
            raise ValueError(f"law must have an exact score: .{name} is missing from a {type(law).__name__}")
    errors = []
    for t in times:
        xt = ForwardProcess().perturb(law.sample(samples, generator=generator), t, generator=generator)
        errors.append(squared_distance(score(xt, t), law.score(xt, t)).mean(-1))
    return torch.stack(errors, -1)


@typed
def score_error(
    score: Score,
    law,
    T0: float,
    T: float,
    *,
    samples: int = 2000,
    nodes: int = 32,
    generator: torch.Generator,
) -> Float[Tensor, "*members"]:
    """The left side of Theorem 3.2: the *squared* L2(P_t) error averaged over t in [T0, T].

    The integral over t is a midpoint rule in log t, where the error, steep near T0, is smooth.

    :param nodes: times at which the error is measured.
    :raises ValueError: not 0 < T0 < T, or a law without an exact score.

    Source: Theorem 3.2, Erratum 15
    """
    if not 0 < T0 < T:
        raise ValueError(f"T0 and T must satisfy 0 < T0 < T, got T0 = {T0}, T = {T}")
    width = math.log(T / T0) / nodes
    times = T0 * torch.exp(width * (torch.arange(nodes) + 0.5))
    return error_curve(score, law, times, samples=samples, generator=generator) @ (times * width / (T - T0))


@typed
def subspace_error(W_B: Float[Tensor, "*members D d0"], B: Float[Tensor, "D d0"]) -> Float[Tensor, "*members"]:
    """norm(W_B W_B' - B B')_F^2, from 0 for the same subspace to 2 d0 for orthogonal ones.

    The columns are orthonormalised first: the product W_B W_B' is a projection only then.

    :raises ValueError: columns that are not linearly independent span no d0-dimensional subspace.

    Source: Corollary 3.2.1, Lemma F.7
    """
    for name, W in (("W_B", W_B), ("B", B)):
        if (torch.linalg.matrix_rank(W) < W.shape[-1]).any():
            raise ValueError(f"{name} must have linearly independent columns")
    P, Q = orthonormalise(W_B), orthonormalise(B)
    return (P @ P.mT - Q @ Q.mT).square().sum((-2, -1))


@typed
def alignment(W_B: Float[Tensor, "*members D d0"], B: Float[Tensor, "D d0"]) -> Float[Tensor, "*members d0 d0"]:
    """The orthogonal U with W_B U closest to B: the two bases may span one subspace in different coordinates.

    Source: Corollary 3.2.1, Erratum 26
    """
    left, _, right = torch.linalg.svd(W_B.mT @ B)
    return left @ right


@typed
def total_variation(
    samples: Float[Tensor, "n k"], log_density: Callable[[Tensor], Tensor], *, radius: float, bins: int = 40
) -> float:
    """Total variation between a sample's histogram and a density on the same cells, in one or two dimensions.

    The cells cut [-radius, radius]^k into ``bins`` parts an axis; all that lies outside is one more cell. The cells
    hide differences finer than themselves, while a finite sample adds its own: an exact sample of n points gives
    about the sum over cells of sqrt(p / (2 pi n)) instead of 0.

    :param log_density: called with points ``(..., k)``, returns ``(...)``.
    :raises ValueError: k > 2 (a grid needs too many samples), or samples that are not finite.

    Source: Corollary 3.2.1, Lemma F.8
    """
    k = samples.shape[1]
    if k > 2:
        raise ValueError(f"samples must have one or two columns, got {k}")
    if not samples.isfinite().all():
        raise ValueError("samples must be finite")
    fine = 4  # midpoints per cell and axis for the density's share
    line = (torch.arange(bins * fine, dtype=samples.dtype) + 0.5) * (2 * radius / (bins * fine)) - radius
    points = torch.stack(torch.meshgrid(*[line] * k, indexing="ij"), -1)
    density = log_density(points).exp() * (line[1] - line[0]) ** k
    expected = (
        density.unfold(0, fine, fine).sum(-1)
        if k == 1
        else density.unfold(0, fine, fine).unfold(1, fine, fine).sum((-2, -1))
    )
    cell = ((samples + radius) * (bins / (2 * radius))).floor().long()
    inside = ((cell >= 0) & (cell < bins)).all(-1)
    index = (cell[inside] * bins ** torch.arange(k).flip(0)).sum(-1)
    share = torch.bincount(index, minlength=bins**k).to(expected) / len(samples)
    outside = (1 - expected.sum()) - (1 - inside.to(expected).mean())
    return 0.5 * ((share - expected.flatten()).abs().sum() + outside.abs()).item()
