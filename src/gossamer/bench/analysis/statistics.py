"""Intervals, linear fits and crossings of curves, each with the number of runs behind it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval, which is None for a single value."""

    mean: float
    low: float | None
    high: float | None
    runs: int


class Noise(NamedTuple):
    """The residual variance of results that neither method nor seed explains."""

    variance: float
    freedom: int
    """Degrees of freedom."""


class Fit(NamedTuple):
    """y = intercept + slope·x by least squares."""

    slope: float
    intercept: float
    r2: float
    runs: int


def noise(results: npt.ArrayLike) -> Noise | None:
    """Estimate the noise in results [methods, seeds], assumed to be the same for all methods.

    s² = Σ (y_ms − ȳ_m − ȳ_s + ȳ)² / ((M − 1)(S − 1)) over M methods m and S seeds s. Pooling all
    methods is needed because with two seeds a pair has one degree of freedom. None for one method
    or one seed.

    >>> noise([[1.0, 2.0], [2.0, 3.5]])
    Noise(variance=0.0625, freedom=1)
    """
    a = np.asarray(results, np.float64)
    freedom = (a.shape[0] - 1) * (a.shape[1] - 1)
    if freedom < 1:
        return None
    left = a - a.mean(1, keepdims=True) - a.mean(0, keepdims=True) + a.mean()
    return Noise(float((left**2).sum()) / freedom, freedom)


def interval(values: npt.ArrayLike, known: Noise | None = None) -> Interval:
    """Return the mean with its 95 % interval, by Student's t: ȳ ± t₀.₉₇₅·√(s² / n).

    Args:
        values: of one method over seeds, or differences of two.
        known: the noise of the two methods, whose differences have twice its variance; without it
            s² is estimated from the values.

    >>> low, high = interval([1.0, 2.0, 3.0])[1:3]
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    """
    a = np.asarray(values, np.float64)
    mean = float(a.mean())
    error, freedom = _standard_error(a, known)
    if freedom < 1:
        return Interval(mean, None, None, len(a))
    half = float(stats.t.ppf(0.975, freedom)) * error
    return Interval(mean, mean - half, mean + half, len(a))


def p_value(values: npt.ArrayLike, known: Noise | None = None) -> float | None:
    """Return the two-sided p of a mean of 0; below 0.05 where ``interval`` excludes 0.

    None for one value without known noise.

    >>> round(p_value([1.0, 2.0, 3.0]), 3)
    0.074
    """
    a = np.asarray(values, np.float64)
    error, freedom = _standard_error(a, known)
    if freedom < 1:
        return None
    if error == 0:
        return float(a.mean() == 0)
    return float(2 * stats.t.sf(abs(a.mean()) / error, freedom))


def _standard_error(a: npt.NDArray[np.float64], known: Noise | None) -> tuple[float, int]:
    """Return the standard error of a mean and its degrees of freedom; 0 if it is unknown."""
    if known is not None:
        return math.sqrt(2 * known.variance / len(a)), known.freedom
    variance = float(a.var(ddof=1)) if len(a) > 1 else math.nan
    return math.sqrt(variance / len(a)), len(a) - 1


def fit(x: npt.ArrayLike, y: npt.ArrayLike) -> Fit | None:
    """Return the least-squares line; None for fewer than three points or equal x.

    >>> fit([0, 1, 2], [1, 3, 5])
    Fit(slope=2.0, intercept=1.0, r2=1.0, runs=3)
    """
    values_x, values_y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(values_x) < 3 or np.ptp(values_x) == 0:
        return None
    line = stats.linregress(values_x, values_y)
    r2 = float(line.rvalue) ** 2 if np.ptp(values_y) else 1.0  # no variance to explain
    return Fit(float(line.slope), float(line.intercept), r2, len(values_x))


def crossings(
    curve: tuple[npt.ArrayLike, npt.ArrayLike], other: tuple[npt.ArrayLike, npt.ArrayLike]
) -> list[float]:
    """Return where a curve crosses another, both linear between points with rising x.

    >>> crossings(([0, 10], [0, 10]), ([0, 10], [4, 6]))
    [5.0]
    """
    (x1, y1), (x2, y2) = (
        (np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in (curve, other)
    )
    if not len(x1) or not len(x2):
        return []
    grid = np.union1d(x1, x2)
    grid = grid[(grid >= max(x1[0], x2[0])) & (grid <= min(x1[-1], x2[-1]))]
    difference = np.interp(grid, x1, y1) - np.interp(grid, x2, y2)
    apart = difference != 0  # curves that only touch do not cross
    grid, difference = grid[apart], difference[apart]
    where = np.flatnonzero(np.sign(difference[:-1]) != np.sign(difference[1:]))
    share = difference[where] / (difference[where] - difference[where + 1])
    return (grid[where] + share * (grid[where + 1] - grid[where])).tolist()
