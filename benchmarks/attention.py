"""Almost-linear attention beside torch's fused exact attention, Performer's random features, and Taylor features.

Run with ``python benchmarks/attention.py``, or ``--quick`` for a few minutes' look. One run, the same inputs, two
threads: q, k uniform in [-B, B], v in [-1, 1], scale 1, float32, tolerance 1e-3. Every measured case is added to
``results.csv`` at once; a run that was stopped goes on where it was, unless ``ditbook/attention.py`` or this file
changed. Prints ratios: exact seconds over seconds, at the error reached.
"""

import argparse
import itertools
import math
import time
from functools import cache

import torch
from _common import THREADS, Record, extra_memory, resident, verdict
from performer_pytorch import FastAttention
from torch.nn.functional import scaled_dot_product_attention

from ditbook import attention
from ditbook.attention import EXTREMES, TESTS, almost_linear_attention, exp_factors, key_moments, smallest_rank
from ditbook.fits import fit_power

TOLERANCE = 1e-3
LENGTHS, SIZES, NORMS = [2**e for e in range(12, 20)], (4, 8, 16), (0.5, 0.7, 1.0, 2.0)
# Exact attention is measured up to here; beyond, its time is multiplied by four for every doubling, and cases that
# were answered exactly at this length are left out (minutes each, and nothing new).
LONGEST_EXACT = 2**17
# Seconds after which a measurement is not repeated.
LONG = 4
# Performer's random features, as many as our first rank; entries of the largest feature matrix of the Taylor peer.
PERFORMER_FEATURES, TAYLOR_ENTRIES = 256, 2**27


def inputs(L: int, d: int, B: float, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (2 * torch.rand(1, 1, L, d, generator=generator) - 1 for _ in range(3))
    return B * q, B * k, v


def seconds(function, repeats: int = 5) -> float:
    """The shortest of several runs, fewer when they are long."""
    shortest, spent = math.inf, 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        elapsed = time.perf_counter() - start
        shortest, spent = min(shortest, elapsed), spent + elapsed
        if spent > LONG:
            break
    return shortest


# --- the peers --------------------------------------------------------------------------------------------------


def fused_exact(q, k, v):
    return scaled_dot_product_attention(q, k, v, scale=1.0)


@cache
def performer(d: int) -> FastAttention:
    torch.manual_seed(0)
    return FastAttention(d, nb_features=PERFORMER_FEATURES)


def performer_attention(q, k, v):
    stretch = q.shape[-1] ** 0.25  # it divides queries and keys by d^(1/4)
    return performer(q.shape[-1])(q * stretch, k * stretch, v)


@cache
def taylor_tables(d: int, degree: int):
    """For each order: the variable that is added, the product that it is added to, and 1/sqrt(a!)."""
    tables, earlier = [], {(): 0}
    for order in range(1, degree + 1):
        products = list(itertools.combinations_with_replacement(range(d), order))
        parents = torch.tensor([earlier[p[:-1]] for p in products])
        weights = [1 / math.prod(math.factorial(p.count(i)) for i in set(p)) for p in products]
        tables.append((torch.tensor([p[-1] for p in products]), parents, torch.tensor(weights).sqrt()))
        earlier = {p: i for i, p in enumerate(products)}
    return tables


def taylor_features(x, degree: int):
    """All monomials x^a/sqrt(a!) of at most this degree: each order from the one before, as one indexed product."""
    product, blocks = torch.ones(len(x), 1), [torch.ones(len(x), 1)]
    for variables, parents, weights in taylor_tables(x.shape[-1], degree):
        product = product[:, parents] * x[:, variables]
        blocks.append(product * weights)
    return torch.cat(blocks, dim=1)


def taylor_attention(q, k, v, degree: int):
    q, k, v = (t.flatten(end_dim=-2) for t in (q, k, v))
    sums = torch.cat([v, torch.ones(len(v), 1)], dim=1).T @ taylor_features(k, degree)
    ratios = sums @ taylor_features(q, degree).T
    return (ratios[:-1] / ratios[-1]).T[None, None]


# --- errors and memory ------------------------------------------------------------------------------------------


class Truth:
    """Exact outputs in double precision at random queries and at the longest ones."""

    def __init__(self, q, k, v):
        generator = torch.Generator().manual_seed(7)
        far = q[0, 0].norm(dim=-1).topk(64).indices
        self.rows = torch.cat([torch.randint(q.shape[-2], (448,), generator=generator), far])
        k, v = k[0, 0].double(), v[0, 0].double()
        parts = q[0, 0, self.rows].double().split(64)
        self.outputs = torch.cat([torch.softmax(part @ k.T, dim=-1) @ v for part in parts])

    def error(self, output) -> float:
        gap = (output[0, 0, self.rows].double() - self.outputs).abs().max()
        return float(gap) if gap.isfinite() else math.inf


def print_memory(L: int, d: int, B: float) -> None:
    almost_linear_attention(*inputs(4096, d, B), 1.0)  # libraries allocate on first use
    q, k, v = inputs(L, d, B)
    before = resident()
    almost_linear_attention(q, k, v, 1.0, TOLERANCE)
    print(resident() - before)


# --- the measurements -------------------------------------------------------------------------------------------


def measure(record: Record, L: int, d: int, B: float) -> None:
    """One case, all methods. Exact attention takes the same time for every B: it is measured once, at 0.7."""
    q, k, v = inputs(L, d, B)
    truth = Truth(q, k, v)
    exact = record.get("exact", L, d, 0.7, "seconds")
    if exact is None:
        measured = min(L, LONGEST_EXACT)
        exact = record.get("exact", measured, d, 0.7, "seconds") or seconds(lambda: fused_exact(q, k, v), 3)
        exact *= (L / measured) ** 2
        record.add("exact", L, d, 0.7, note="extrapolated" if measured < L else "", seconds=exact)

    start = time.perf_counter()
    output, certificate = almost_linear_attention(q, k, v, 1.0, TOLERANCE, return_certificate=True)
    own, error = time.perf_counter() - start, truth.error(output)
    if own < LONG:
        own = seconds(lambda: almost_linear_attention(q, k, v, 1.0, TOLERANCE))
    degree, taylor, taylor_error = measure_taylor(q, k, v, truth, error, exact)
    random = seconds(lambda: performer_attention(q, k, v), 3)
    random_error = truth.error(performer_attention(q, k, v))
    record.add("performer", L, d, B, seconds=random, error=random_error, rank=PERFORMER_FEATURES)
    if degree:
        record.add("taylor", L, d, B, seconds=taylor, error=taylor_error, degree=degree, rank=math.comb(d + degree, d))
    record.add(
        "almost-linear",
        L,
        d,
        B,
        note=certificate.method,
        seconds=own,
        error=error,
        sampled_error=certificate.sampled_error,
        rank=certificate.rank or 0,
        gain=certificate.predicted_gain,
        fast=certificate.fast_share,
    )
    print(
        f"{L:7d} {d:3d} {B:4.1f}  {certificate.method:10s} {certificate.rank or 0:5d} {error:9.1e} {own:9.4f} "
        f"{exact / own:9.1f} | {degree or '-':>3} {taylor / own:8.1f} {taylor_error:9.1e} | {random / own:6.1f} "
        f"{random_error:9.1e}",
        flush=True,
    )


def measure_taylor(q, k, v, truth: Truth, error: float, exact: float) -> tuple[int | None, float, float]:
    """The smallest degree whose error is at most ``error``, its seconds and error; None when that is hopeless."""
    L, d = q.shape[-2:]
    for degree in range(1, 20):
        if math.comb(d + degree, degree) * L > TAYLOR_ENTRIES:
            break
        start = time.perf_counter()
        reached = truth.error(taylor_attention(q, k, v, degree))
        if reached <= error:
            return degree, seconds(lambda degree=degree: taylor_attention(q, k, v, degree), 3), reached
        if time.perf_counter() - start > 2 * exact:
            break
    return None, math.inf, math.inf


def measure_floor(record: Record, d: int, B: float) -> None:
    """The smallest leading rank of the factors at which every output is within the tolerance, and the SVD's."""
    q, k, v = (x[0, 0].double() for x in inputs(2048, d, B))
    P = torch.softmax(q @ k.T, dim=-1)
    exact = P @ v
    U, S, V = torch.linalg.svd(P)
    U, V = U * S, V @ v
    floor = next(r for r in range(1, 2048) if float((U[:, :r] @ V[:r] - exact).abs().max()) <= TOLERANCE)
    factors = exp_factors(q.float(), k.float(), 900, 1.0)
    everything = attention.Tests(torch.arange(2048), exact)
    rank = smallest_rank(factors, key_moments(factors, v.float()), everything, TOLERANCE)
    record.add("svd-floor", 2048, d, B, rank=floor)
    record.add("factors", 2048, d, B, rank=rank)


def machine_limit(d: int, rank: int, L: int) -> float:
    """Seconds of the bare products and powers of two of one call, on arrays that fit the cache."""
    rows, width = 2048, 256
    x, table, values = torch.rand(rows, d + 2), torch.rand(d + 2, width), torch.rand(d + 1, rows)
    block = torch.rand(rows, width)
    each = sum(
        seconds(step, 50) / (rows * width)
        for step in (lambda: x @ table, lambda: torch.exp2(block), lambda: values @ block)
    )
    return each * L * (TESTS + 2 * EXTREMES + 2 * rank)


# --- the report -------------------------------------------------------------------------------------------------


def report(record: Record, lengths) -> None:
    own = {key: record.get("almost-linear", *key, "seconds") for key in itertools.product(lengths, SIZES, NORMS)}
    own = {key: value for key, value in own.items() if value is not None}
    print("\nBars (q, k uniform in [-B, B], tolerance 1e-3)")
    worst = max(record.get("almost-linear", *key, "error") for key in own)
    verdict("largest error of all cases", worst, TOLERANCE, at_least=False)
    for L, bar in ((2**16, 25), (2**17, 60)):
        if (L, 8, 0.7) in own:
            ratio = record.get("exact", L, 8, 0.7, "seconds") / own[L, 8, 0.7]
            verdict(f"exact over almost-linear, L = {L}, d = 8, B = 0.7", ratio, bar, at_least=True)
    fitted = [L for L in lengths if L >= 2**13]
    if len(fitted) > 2:
        for d, B in itertools.product(SIZES, NORMS):
            if all(record.get("almost-linear", L, d, B, "fast") == 1 for L in fitted):
                slope, (low, high) = fit_power(
                    fitted, [record.get("almost-linear", L, d, B, "seconds") for L in fitted]
                )
                what = f"exponent in L, d = {d}, B = {B} (95% interval {low:.2f} to {high:.2f})"
                verdict(what, slope, 1.1, at_least=False) if (d, B) == (8, 0.7) else print(
                    f"       {what}: {slope:.3g}"
                )
        slope, (low, high) = fit_power(fitted, [record.get("exact", L, 8, 0.7, "seconds") for L in fitted])
        print(f"       exponent in L of exact attention: {slope:.3g} ({low:.2f} to {high:.2f})")
    memory = record.get("almost-linear", lengths[-1], 8, 0.7, "extra_memory")
    if memory is not None:
        verdict(f"extra memory in GiB at L = {lengths[-1]}", memory, 1, at_least=False)
    ratios = {
        key: record.get("taylor", *key, "seconds") / value
        for key, value in own.items()
        if key[0] >= 2**14 and key[1] >= 8 and key[2] <= 0.7 and record.get("taylor", *key, "seconds")
    }
    if ratios:
        key = min(ratios, key=ratios.get)
        verdict(f"Taylor over almost-linear at equal error, worst at L, d, B = {key}", ratios[key], 2, at_least=True)
    for d, B in itertools.product((4, 8), (0.5, 0.7, 1.0)):
        ratio = record.get("factors", 2048, d, B, "rank") / record.get("svd-floor", 2048, d, B, "rank")
        what = f"rank over the SVD floor, L = 2048, d = {d}, B = {B}"
        verdict(what, ratio, 3, at_least=False) if d == 4 else print(f"       {what}: {ratio:.3g}")
    fast = [key for key in own if record.get("almost-linear", *key, "fast") == 1]
    gains = [key for key in own if record.get("almost-linear", *key, "gain") >= 2]
    print(f"       share of cases on a fast path: {len(fast)} of {len(own)}")
    verdict("cases of predicted gain 2 or more computed exactly", len(set(gains) - set(fast)), 0, at_least=False)
    for L in (2**14, 2**16, lengths[-1]):
        if (L, 8, 0.7) in own:
            limit = machine_limit(8, int(record.get("almost-linear", L, 8, 0.7, "rank")), L)
            print(f"       time over products and powers of two alone, L = {L}: {own[L, 8, 0.7] / limit:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="lengths to 2^16, d = 8, B = 0.5 and 0.7")
    parser.add_argument("--memory", nargs=3, type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    if arguments.memory:
        L, d, B = arguments.memory
        return print_memory(int(L), int(d), B)
    lengths, sizes, norms = (LENGTHS[:5], (8,), (0.5, 0.7)) if arguments.quick else (LENGTHS, SIZES, NORMS)
    record = Record("attention", [attention.__file__, __file__])
    print(", ".join(record.origin.values()))
    print("      L   d    B  method      rank     error   seconds   exact: | Taylor: degree, ratio, error | Performer")
    for L, d, B in itertools.product(lengths, sizes, norms):
        out_of_reach = L > LONGEST_EXACT and record.get("almost-linear", LONGEST_EXACT, d, B, "fast") == 0
        if record.get("almost-linear", L, d, B, "seconds") is None and not out_of_reach:
            measure(record, L, d, B)
    if record.get("almost-linear", lengths[-1], 8, 0.7, "extra_memory") is None:
        record.add("almost-linear", lengths[-1], 8, 0.7, extra_memory=extra_memory(__file__, lengths[-1], 8, 0.7))
    for d, B in itertools.product((4, 8), (0.5, 0.7, 1.0)):
        if record.get("factors", 2048, d, B, "rank") is None:
            measure_floor(record, d, B)
    report(record, lengths)


if __name__ == "__main__":
    main()
