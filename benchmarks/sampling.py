"""Backward sampling with the exact score at D = 8, d0 = 2: a million samples, distance to the law they should follow.

Prints, for each step of (D.4), the total variation to P_T0 on a 40 x 40 grid over the plane of the data, the same for
exact samples (the sampling floor), their ratio, and the seconds. Run with two threads: OMP_NUM_THREADS=2.
"""

import time

import torch
from _common import verdict

from ditbook.diffusion import ForwardProcess, sample_backward
from ditbook.estimation import total_variation
from ditbook.subspace import GaussianMixture, SubspaceLaw, random_subspace

SAMPLES, T, T0 = 1_000_000, 5.0, 0.2
STEPS = (0.4, 0.2, 0.1, 0.05)
TV, SECONDS = 0.05, 60  # the bars for the finest step
GRID = {"radius": 4.0, "bins": 40}

CLUSTERS = GaussianMixture(
    torch.tensor([0.4, 0.3, 0.3]),
    torch.tensor([[1.5, 0.0], [-1.0, 1.2], [-1.0, -1.2]]),
    torch.tensor([[0.3, 0.1], [0.1, 0.2]]).expand(3, 2, 2),
)


def distance_to_law(h: torch.Tensor) -> float:
    """Total variation between latents h, (n, 2), and P^h_T0, on the cells of the grid."""
    return total_variation(h, lambda at: CLUSTERS.log_density(at, T0), **GRID)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    process = ForwardProcess()
    law = SubspaceLaw(random_subspace(8, 2, generator=generator), CLUSTERS)
    exact = process.perturb(CLUSTERS.sample(SAMPLES, generator=generator), T0, generator=generator)
    floor = distance_to_law(exact)
    print(f"{SAMPLES} samples, T = {T:g}, T0 = {T0:g}, {torch.get_num_threads()} threads, sampling floor {floor:.4f}")
    print(f"{'step':>6}{'evaluations':>13}{'TV':>9}{'TV / floor':>12}{'seconds':>9}")
    for step in STEPS:
        start = time.perf_counter()
        samples = sample_backward(law.score, process, (SAMPLES, 8), T, T0, step, generator=generator)
        distance, seconds = distance_to_law(samples @ law.basis), time.perf_counter() - start
        evaluations = round((T - T0) / step)
        print(f"{step:6g}{evaluations:13d}{distance:9.4f}{distance / floor:12.2f}{seconds:9.1f}", flush=True)
    verdict("total variation at the finest step", distance, TV, at_least=False)
    verdict("seconds at the finest step", seconds, SECONDS, at_least=False)


if __name__ == "__main__":
    main()
