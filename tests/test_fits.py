"""ditbook/fits.py: slopes against closed forms, intervals by their coverage, refusals."""

import math
from functools import partial

import numpy as np
import pytest

from ditbook.fits import fit_line, fit_median_power, fit_power

X = np.array([1.0, 2.0, 4.0, 8.0, 16.0])


def test_exact_laws_come_back_exactly():
    slope, (low, high) = fit_line(X, 3 - 2 * X)
    assert (slope, low, high) == pytest.approx((-2, -2, -2))
    assert fit_power(X, 5 * X**-1.5)[0] == pytest.approx(-1.5)
    exponent, interval = fit_median_power(X, np.outer(X**0.5, [1.0, 1.0, 7.0]))
    assert exponent == pytest.approx(0.5)
    assert interval[0] < 0.5 < interval[1]


def test_the_slope_is_that_of_the_normal_equations():
    y = np.random.default_rng(0).normal(size=5)
    slope, _ = fit_line(X, y)
    assert slope == pytest.approx(((X - X.mean()) @ y) / ((X - X.mean()) @ X))


def coverage(fit, noisy, repetitions=400):
    """How often the interval holds the true slope 1."""
    rng = np.random.default_rng(1)
    intervals = [fit(X, noisy(rng))[1] for _ in range(repetitions)]
    return np.mean([low <= 1 <= high for low, high in intervals])


def test_an_interval_holds_the_truth_in_95_of_100_cases():
    assert 0.92 <= coverage(fit_line, lambda rng: X + rng.normal(size=5)) <= 0.98
    assert 0.92 <= coverage(fit_power, lambda rng: X * np.exp(rng.normal(size=5))) <= 0.98
    # The bootstrap of medians of fifteen is a little narrow or wide, but no constant factor off.
    few = partial(fit_median_power, repetitions=200)
    assert 0.88 <= coverage(few, lambda rng: X[:, None] * np.exp(rng.normal(size=(5, 15)))) <= 1


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1, 2], [1, 2], r"at least three, got \{'x': 2, 'y': 2\}"),
        ([1, 2, 3], [1, 2], r"got \{'x': 3, 'y': 2\}"),
        ([1, 2, 3], [1, math.nan, 3], "y must be finite, got nan"),
    ],
)
def test_what_cannot_be_fitted_is_refused(x, y, message):
    with pytest.raises(ValueError, match=message):
        fit_line(x, y)


def test_a_power_law_needs_positive_values():
    with pytest.raises(ValueError, match="y must be positive for a power law, got 0"):
        fit_power([1, 2, 3], [1, 0, 2])
    with pytest.raises(ValueError, match="x must be positive"):
        fit_median_power([-1, 2, 3], np.ones((3, 2)))
