"""Deciding formulas with one attention call, beside a plain search for an orthogonal pair and a SAT solver.

Run with ``python benchmarks/hardness.py [largest n]``. One run, the same formulas, two threads. Prints seconds,
their ratios, the exponent of the time in L, and the peak memory of the whole process, which an L x L array
would show: at n = 30 it has 8 GiB. On a machine that others use, processor seconds over all threads say more than
the clock; the exponent is fitted to them, the bar is held against the clock.
"""

import sys
import time

import torch
from _common import resident, verdict
from pysat.solvers import Cadical153

from ditbook.fits import fit_power
from ditbook.hardness import orthogonal_vectors, random_formula, satisfiable

RATIO = 4.27  # clauses a variable at which half of the random formulas are satisfiable
BLOCK = 2**22  # inner products that the plain search holds at a time
SECONDS, GIB = 60, 3  # the bar for n = 30


def timed(function, *arguments):
    """Result, seconds on the clock, and seconds of processor time over all threads."""
    start, work = time.perf_counter(), time.process_time()
    result = function(*arguments)
    return result, time.perf_counter() - start, time.process_time() - work


def count_pairs(formula) -> int:
    """The plain search: all inner products, in blocks of rows, zeros counted."""
    a, b = orthogonal_vectors(formula)
    blocks = a.split(max(1, BLOCK // len(b)))
    return len(a) * len(b) - sum(int((rows @ b.T).count_nonzero()) for rows in blocks)


def solve(formula) -> bool:
    with Cadical153(bootstrap_with=formula.clauses) as solver:
        return solver.solve()


def main(largest: int = 30) -> None:
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {RATIO} clauses a variable")
    print(" n       L clauses models  attention/s (cpu/s)  search/s  solver/s  att:search  att:solver  peak/GiB")
    works = {}
    for n in range(min(24, largest), largest + 1, 2):
        formula = random_formula(n, round(RATIO * n), generator)
        decision, attention, work = timed(satisfiable, formula)
        peak = resident() / 2**30
        pairs, search, _ = timed(count_pairs, formula)
        answer, solver, _ = timed(solve, formula)
        if (decision.satisfiable, decision.model_count) != (answer, pairs):
            raise SystemExit(f"n = {n}: attention says {decision}, the search counts {pairs}, the solver says {answer}")
        works[2 ** (n // 2)] = work
        print(
            f"{n:2d} {2 ** (n // 2):7d} {len(formula.clauses):7d} {pairs:6d} {attention:12.2f} {work:7.1f} "
            f"{search:9.2f} {solver:9.4f} {attention / search:11.1f} {attention / solver:11.0f} {peak:9.2f}"
        )
    if len(works) > 2:
        print(
            f"exponent of attention's processor time in L: {fit_power([*works], [*works.values()])[0]:.2f} (2 expected)"
        )
    if n == 30:
        verdict("seconds at n = 30", attention, SECONDS, at_least=False)
        verdict("GiB at n = 30", peak, GIB, at_least=False)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
