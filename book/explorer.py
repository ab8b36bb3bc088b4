"""Tables for the explorer page, computed by `ditbook` when the site is built; sliders only look things up in them."""

import math
from functools import cache

from ditbook.attention import exp_polynomial
from ditbook.covering import log10_xi
from ditbook.universality import Grid

# The values each slider stops at.
LENGTHS = [2**e for e in range(8, 23)]
HEAD_SIZES = [2, 4, 8, 16, 32, 64]
BOUNDS = [0.25, 0.5, 0.7, 1.0, 1.5, 2.0]
TOLERANCES = [1e-1, 1e-2, 1e-3, 1e-4, 1e-6]
SCALES = {"none": lambda d: 1.0, "1/√d": lambda d: d**-0.5, "1/d": lambda d: 1 / d}
CELLS = list(range(2, 21))
TOKEN_SIZES, TOKEN_COUNTS = [1, 2, 3, 4], [2, 3, 4, 5, 6]
SAMPLES = [10**e for e in range(1, 13)]
ACCURACIES = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
# Beyond this logit the monomials of the polynomial cancel too much for double precision.
LARGEST_LOGIT = 12.0


def tables() -> dict:
    """Slider stops and looked-up values of the three parts of the page, ready for JSON."""
    return {
        "attention": {
            "stops": {"L": LENGTHS, "d": HEAD_SIZES, "B": BOUNDS, "tolerance": TOLERANCES, "scale": list(SCALES)},
            "logit": [[[logit(d, B, scale) for scale in SCALES] for B in BOUNDS] for d in HEAD_SIZES],
            "degree": [[[_degrees(logit(d, B, scale)) for scale in SCALES] for B in BOUNDS] for d in HEAD_SIZES],
        },
        "depth": {
            "stops": {"d": TOKEN_SIZES, "L": TOKEN_COUNTS, "cells": CELLS},
            "log10": [[[_log10_depth(d, L, n) for n in CELLS] for L in TOKEN_COUNTS] for d in TOKEN_SIZES],
        },
        "rate": {
            "stops": {"n": SAMPLES, "eps": ACCURACIES, "L": TOKEN_COUNTS},
            "log10": [[[_finite(log10_xi(n, e, L)) for L in TOKEN_COUNTS] for e in ACCURACIES] for n in SAMPLES],
        },
    }


def logit(d: int, B: float, scale: str) -> float:
    """The largest logit that entries up to B allow."""
    return SCALES[scale](d) * d * B**2


@cache
def degree(bound: float, tolerance: float) -> int | None:
    """Smallest even degree whose outputs are within half the tolerance; None beyond the table."""
    if bound > LARGEST_LOGIT:
        return None
    return next((g for g in range(0, 80, 2) if _error(bound, g) <= tolerance / 2), None)


@cache
def _error(bound: float, g: int) -> float:
    return exp_polynomial(bound, g).error_bound


def _degrees(bound: float) -> list[int | None]:
    return [degree(round(bound, 6), tolerance) for tolerance in TOLERANCES]


def _log10_depth(d: int, L: int, n: int) -> float:
    return round(math.log10(sum(Grid(d, L, n).layer_counts.values())), 3)


def _finite(value: float) -> float | None:
    return round(value, 2) if math.isfinite(value) else None
