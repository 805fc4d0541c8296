"""Straight lines through measured points, for the exponents and rates that experiments report."""

from typing import NamedTuple

import numpy as np
from scipy import stats

from .._typing import ArrayLike


class Line(NamedTuple):
    """y ≈ slope·x + intercept, the slope between `low` and `high` at the confidence asked for."""

    slope: float
    intercept: float
    low: float
    high: float


def fit_line(x: ArrayLike, y: ArrayLike, confidence: float = 0.95) -> Line:
    """Least squares, with Student's t interval of the slope (n − 2 degrees of freedom).

    The interval is that of independent errors of one size; where points bend away from a line
    rather than scatter about it, it says how much, not how probably. Points that are not finite
    are left out; with fewer than three there is no interval, with fewer than two nothing, and what
    there is not is NaN.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(np.unique(x)) < 2:
        return Line(np.nan, np.nan, np.nan, np.nan)
    found = stats.linregress(x, y)
    slope, intercept = float(found.slope), float(found.intercept)
    if len(x) < 3:
        return Line(slope, intercept, np.nan, np.nan)
    half = float(stats.t.ppf((1 + confidence) / 2, len(x) - 2) * found.stderr)
    return Line(slope, intercept, slope - half, slope + half)
