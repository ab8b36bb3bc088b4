"""Backward sampling with the exact score at D = 8, d0 = 2: a million samples, distance to the law they should follow.

Prints, for each step of (D.4), the total variation to P_T0 on a 40 x 40 grid over the plane of the data, the same for
exact samples (the sampling floor), their ratio, and the seconds. Run with two threads: OMP_NUM_THREADS=2.
"""

import time

import torch
from _common import verdict

from ditbook.diffusion import ForwardProcess, sample_backward
from ditbook.subspace import GaussianMixture, SubspaceLaw, random_subspace

SAMPLES, T, T0 = 1_000_000, 5.0, 0.2
STEPS = (0.4, 0.2, 0.1, 0.05)
TV, SECONDS = 0.05, 60  # the bars for the finest step
HALF_WIDTH, CELLS, FINE = 4.0, 40, 5

CLUSTERS = GaussianMixture(
    torch.tensor([0.4, 0.3, 0.3]),
    torch.tensor([[1.5, 0.0], [-1.0, 1.2], [-1.0, -1.2]]),
    torch.tensor([[0.3, 0.1], [0.1, 0.2]]).expand(3, 2, 2),
)


def cell_probabilities() -> torch.Tensor:
    """P^h_T0 of the cells, by the midpoint rule on a grid FINE times finer; shape (CELLS, CELLS)."""
    width = 2 * HALF_WIDTH / (CELLS * FINE)
    ticks = width * (torch.arange(CELLS * FINE) + 0.5) - HALF_WIDTH
    mass = CLUSTERS.log_density(torch.cartesian_prod(ticks, ticks), T0).exp() * width**2
    return mass.reshape(CELLS, FINE, CELLS, FINE).sum((1, 3))


def total_variation(h: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Distance on the grid, with what lies outside it as one more cell."""
    index = ((h + HALF_WIDTH) * (CELLS / (2 * HALF_WIDTH))).floor().long()
    index = index[((index >= 0) & (index < CELLS)).all(-1)]
    counts = torch.bincount(index[:, 0] * CELLS + index[:, 1], minlength=CELLS**2)
    found = (counts.double() / len(h)).reshape(CELLS, CELLS)
    outside = (found.sum() - probabilities.sum()).abs()
    return float((found - probabilities).abs().sum() + outside) / 2


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    process, probabilities = ForwardProcess(), cell_probabilities().double()
    law = SubspaceLaw(random_subspace(8, 2, generator=generator), CLUSTERS)
    exact = process.perturb(CLUSTERS.sample(SAMPLES, generator=generator), T0, generator=generator)
    floor = total_variation(exact, probabilities)
    print(f"{SAMPLES} samples, T = {T:g}, T0 = {T0:g}, {torch.get_num_threads()} threads, sampling floor {floor:.4f}")
    print(f"{'step':>6}{'evaluations':>13}{'TV':>9}{'TV / floor':>12}{'seconds':>9}")
    for step in STEPS:
        start = time.perf_counter()
        samples = sample_backward(law.score, process, (SAMPLES, 8), T, T0, step, generator=generator)
        distance, seconds = total_variation(samples @ law.basis, probabilities), time.perf_counter() - start
        evaluations = round((T - T0) / step)
        print(f"{step:6g}{evaluations:13d}{distance:9.4f}{distance / floor:12.2f}{seconds:9.1f}", flush=True)
    verdict("total variation at the finest step", distance, TV, at_least=False)
    verdict("seconds at the finest step", seconds, SECONDS, at_least=False)


if __name__ == "__main__":
    main()
