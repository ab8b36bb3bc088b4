"""The almost-linear gradient beside automatic differentiation through torch's fused attention.

Run with ``python benchmarks/gradient.py``, or ``--quick`` for lengths up to 2^14. One run, the same inputs, two
threads: A1, A2 uniform in [-B, B], A3 in [-1, 1], W = W_OV = I, scale 1, float32. Two kinds of targets: the output of
another layer, as in training, and random ones, for which the terms of the gradient cancel and a relative tolerance is
hardest. Autograd is measured up to 2^15 and multiplied by four for every doubling beyond. Errors are true ones up to
2^14, from a gradient in double precision; beyond, the certificate's estimate. Rows go to ``results.csv``.
"""

import argparse
import math
import time
from functools import cache

import torch
from _common import THREADS, Record, extra_memory, resident, verdict
from torch.nn.functional import scaled_dot_product_attention

from ditbook import attention, gradient
from ditbook.attention import softmax_attention
from ditbook.fits import fit_power
from ditbook.gradient import almost_linear_gradient, dit_gradient

WIDTH, NORM, TOLERANCE = 8, 0.7, 1e-2
LENGTHS = [2**e for e in range(10, 18)]
LONGEST_EXACT, LONGEST_TRUTH = 2**15, 2**14
TARGETS = ("another layer", "random")
# The curve of error against speed, at one length.
CURVE_LENGTH, CURVE = 2**14, {4: (1e-1, 1e-2, 1e-3, 1e-4, 1e-6), 8: (1e-1, 3e-2, 3e-3, 1e-3)}


def inputs(L: int, d: int, target: str):
    """W, A1, A2, A3, W_OV, Y."""
    generator = torch.Generator().manual_seed(0)
    A1, A2, A3, Y = (2 * torch.rand(L, d, generator=generator) - 1 for _ in range(4))
    A1, A2 = NORM * A1, NORM * A2
    if target == "another layer":
        other = torch.eye(d) + torch.randn(d, d, generator=generator) / math.sqrt(d)
        Y = softmax_attention(A1 @ other, A2, A3, 1.0) + 0.1 * Y
    return torch.eye(d), A1, A2, A3, torch.eye(d), Y


def autograd(W, A1, A2, A3, W_OV, Y):
    """Four dimensions are what torch's fused kernel asks for."""
    W = W.clone().requires_grad_()
    q, k, v = (x[None, None] for x in (A1 @ W, A2, A3 @ W_OV.mT))
    loss = (scaled_dot_product_attention(q, k, v, scale=1.0)[0, 0] - Y).square().sum() / 2
    return torch.autograd.grad(loss, W)[0]


def timed(function, repeats: int = 3):
    """What the function returns, and the shortest of several runs in seconds; fewer when they are long."""
    shortest, start = math.inf, time.perf_counter()
    for _ in range(repeats):
        begin = time.perf_counter()
        result = function()
        shortest = min(shortest, time.perf_counter() - begin)
        if time.perf_counter() - start > 4:
            break
    return result, shortest


@cache
def truth(L: int, d: int, target: str):
    return dit_gradient(*(x.double() for x in inputs(L, d, target)))


def error(found, exact) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def print_memory(L: int) -> None:
    """Bytes that a call adds to inputs and libraries."""
    almost_linear_gradient(*inputs(4096, WIDTH, "random"), tolerance=TOLERANCE)  # libraries allocate on first use
    case = inputs(L, WIDTH, "random")
    before = resident()
    almost_linear_gradient(*case, tolerance=TOLERANCE)
    print(resident() - before)


def measure(record: Record, L: int, d: int, target: str, tolerance: float, exact_seconds: float) -> float:
    """Times one case, records and prints it; returns the seconds of the fast gradient."""
    case = inputs(L, d, target)
    (found, certificate), own = timed(
        lambda: almost_linear_gradient(*case, tolerance=tolerance, return_certificate=True)
    )
    true = L <= LONGEST_TRUTH
    reached = error(found, truth(L, d, target)) if true else certificate.sampled_error
    note = f"{target} target, tolerance {tolerance:g}, {certificate.method}, {'true' if true else 'estimated'} error"
    rank = certificate.rank or 0
    record.add(
        "almost-linear", L, d, NORM, note, seconds=own, error=reached, bound=certificate.confidence_bound, rank=rank
    )
    print(
        f"{L:7d} {d:3d}  {target:14s}{tolerance:8.0e}  {certificate.method:9s}{rank:5d}{reached:10.1e} "
        f"{'true' if true else 'est.':5s}{own:9.3f}{exact_seconds / own:9.1f}",
        flush=True,
    )
    return own


@cache
def autograd_seconds(L: int, d: int) -> float:
    return timed(lambda: autograd(*inputs(L, d, "random")))[1]


def time_autograd(record: Record, L: int, d: int) -> float:
    measured = min(L, LONGEST_EXACT)
    time_taken = autograd_seconds(measured, d) * (L / measured) ** 2
    record.add("autograd", L, d, NORM, "extrapolated" if measured < L else "", seconds=time_taken)
    return time_taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="lengths up to 2^14, no curve")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    if arguments.memory:
        return print_memory(arguments.memory)
    lengths = LENGTHS[:5] if arguments.quick else LENGTHS
    # A run takes minutes: it starts afresh.
    record = Record("gradient", [attention.__file__, gradient.__file__, __file__], resume=False)
    print(", ".join(record.origin.values()))
    print("      L   d  target        tolerance  method    rank     error        seconds  autograd:")
    exact, own = {}, {}
    for L in lengths:
        exact[L] = time_autograd(record, L, WIDTH)
        for target in TARGETS:
            own[target, L] = measure(record, L, WIDTH, target, TOLERANCE, exact[L])
    if not arguments.quick:
        print("\nError against speed")
        for d, tolerances in CURVE.items():
            time_exact = exact[CURVE_LENGTH] if d == WIDTH else time_autograd(record, CURVE_LENGTH, d)
            for tolerance in tolerances:
                measure(record, CURVE_LENGTH, d, "another layer", tolerance, time_exact)
    memory = extra_memory(__file__, lengths[-1])
    record.add("almost-linear", lengths[-1], WIDTH, NORM, "random target", extra_memory=memory)
    print(f"\nBars (d = {WIDTH}, B = {NORM}, tolerance {TOLERANCE:g}, float32)")
    for L, bar in ((2**14, 5), (2**17, 40)):
        for target in TARGETS:
            if L in lengths:
                verdict(f"autograd over almost-linear, L = {L}, {target} target", exact[L] / own[target, L], bar, True)
    fitted = [L for L in lengths if L >= 2**13]  # shorter ones are computed exactly
    for target in TARGETS:
        if len(fitted) > 2:
            slope, (low, high) = fit_power(fitted, [own[target, L] for L in fitted])
            what = f"time exponent, {target} target (95% interval {low:.2f} to {high:.2f})"
            verdict(what, slope, 1.15, at_least=False)
    verdict(f"extra memory in GiB at L = {lengths[-1]}", memory, 1, False)


if __name__ == "__main__":
    main()
