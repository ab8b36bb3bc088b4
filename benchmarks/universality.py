"""Building and running the hardmax network of Appendix E: layers, seconds and memory, beside the bare look-up.

Run with ``python benchmarks/universality.py`` (about half a minute, two threads). Each network approximates one smooth
function; 10,000 random points walk through all its layers.
"""

import time

import torch
from _common import resident, verdict

from ditbook.universality import construct

POINTS = 10_000
SHAPES = ((1, 2, 82), (2, 2, 12), (1, 4, 16))
LAYERS, SECONDS, BUILD_SECONDS, GIB = 100_000, 30, 20, 2


def target(X: torch.Tensor) -> torch.Tensor:
    """A smooth function of all tokens."""
    return torch.sin(3 * X) + X.flip(-2)


def timed(function, *arguments):
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    print(f"{POINTS} points, {torch.get_num_threads()} threads")
    print(" d  L  1/δ   layers  build/s    run/s  run : look-up  largest gap  peak/GiB")
    for d, L, n in SHAPES:
        network, build = timed(construct, target, d, L, 1 / n)
        X = torch.rand(POINTS, L, d, dtype=torch.float64, generator=generator)
        output, run = timed(network, X)
        expected, look_up = timed(lambda X, n: target((torch.floor(X * n) + 0.5) / n), X, n)
        peak = resident() / 2**30
        layers, gap = sum(network.layer_counts.values()), float((output - expected).abs().max())
        print(f"{d:2d} {L:2d} {n:4d} {layers:8d} {build:8.1f} {run:8.1f} {run / look_up:14.0f} {gap:12.1e}", end="")
        print(f"{peak:10.2f}")
        if layers >= LAYERS:
            verdict(f"seconds to run {layers} layers", run, SECONDS, at_least=False)
            verdict("seconds to build them", build, BUILD_SECONDS, at_least=False)
            verdict("GiB", peak, GIB, at_least=False)


if __name__ == "__main__":
    main()
