"""Fitted slopes and exponents, each with its 95% confidence interval."""

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, Interval]:
    """Least-squares slope of y against x, and its interval from Student's t: it takes the errors for independent.

    :raises ValueError: fewer than three points (two leave nothing to judge the fit by), different numbers of x and y,
        or entries that are not finite.
    """
    from scipy.stats import linregress, t

    x, y = _points(x=x, y=y)
    line = linregress(x, y)
    half = t.ppf(0.975, len(x) - 2) * line.stderr
    return float(line.slope), (float(line.slope - half), float(line.slope + half))


def fit_power(x: Sequence[float], y: Sequence[float]) -> tuple[float, Interval]:
    """The exponent a of y ~ x^a: :func:`fit_line` in logarithms.

    :raises ValueError: as :func:`fit_line`; entries that are not positive.
    """
    return fit_line(*_logs(x=x, y=y))


def fit_median_power(
    x: Sequence[float], y: Sequence[Sequence[float]], repetitions: int = 2000
) -> tuple[float, Interval]:
    """The exponent a of median(y) ~ x^a, from several values y, (points, members), at each x, (points,).

    The interval is that of the percentile bootstrap: the members at each point are drawn again, ``repetitions`` times,
    from a fixed seed.

    :raises ValueError: as :func:`fit_power`.
    """
    log_x, log_y = _logs(x=x, y=y)
    rng = np.random.default_rng(0)
    draws = rng.integers(log_y.shape[1], size=(repetitions, *log_y.shape))
    medians = np.median(np.take_along_axis(log_y[None], draws, 2), 2)
    low, high = np.percentile(np.polyfit(log_x, medians.T, 1)[0], [2.5, 97.5])
    return float(np.polyfit(log_x, np.median(log_y, 1), 1)[0]), (float(low), float(high))


def _points(**values: Sequence) -> list[np.ndarray]:
    arrays = {name: np.asarray(value, dtype=float) for name, value in values.items()}
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1 or min(counts.values()) < 3:
        raise ValueError(f"a fit needs the same number of x and y, at least three, got {counts}")
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite, got {array[~np.isfinite(array)][0]}")
    return list(arrays.values())


def _logs(**values: Sequence) -> list[np.ndarray]:
    for name, value in values.items():
        smallest = np.asarray(value, dtype=float).min(initial=math.inf)
        if smallest <= 0:
            raise ValueError(f"{name} must be positive for a power law, got {smallest}")
    return [np.log(array) for array in _points(**values)]
