"""The statistics of a correlation study, for few runs: each says what it rests on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from gossamer.topology.arrays import FloatArray

FEWEST = 5
"""Runs for a correlation: of fewer, even a perfect one has a p-value above 0.05."""

_EXACT_UP_TO = 8
_RANDOM_UP_TO = 100
_PERMUTATIONS = 9999


class Correlation(NamedTuple):
    """Spearman's rank correlation; None where it cannot be told, and why."""

    rho: float | None
    p: float | None
    runs: int
    note: str = ""


class Interval(NamedTuple):
    """A mean and the 95 % confidence interval around it, which one value does not have."""

    mean: float
    low: float | None
    high: float | None
    runs: int


class Noise(NamedTuple):
    """What of results neither the method nor the seed explains."""

    variance: float
    freedom: int
    """Degrees of freedom: how much it is known from."""


class Fit(NamedTuple):
    """y = intercept + slope·x by least squares."""

    slope: float
    intercept: float
    r2: float
    runs: int


def spearman(
    x: npt.ArrayLike, y: npt.ArrayLike, strata: Sequence[object] | None = None
) -> Correlation:
    """Return the rank correlation of x and y.

    Args:
        x: one value per run.
        y: one value per run.
        strata: which runs may be compared, such as those of one scale. Ranks are taken, and
            centred, within each stratum, so that differences between strata have no part.

    The p-value is two-sided. One stratum: from all permutations where runs are few, else from a
    t-distribution. Several: from random permutations within strata, or where runs are many from
    the normal distribution with the variance of those permutations.

    >>> spearman([1, 2, 3, 4, 5], [1, 4, 9, 16, 25]).rho
    1.0
    """
    values_x, values_y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    groups = _positions(strata or [0] * len(values_x))
    n = len(values_x)
    if n < FEWEST:
        return Correlation(None, None, n, f"too few runs: {n}, at least {FEWEST} are needed")
    ranks_x, ranks_y = _ranks(values_x, groups), _ranks(values_y, groups)
    scale = math.sqrt(float(ranks_x @ ranks_x) * float(ranks_y @ ranks_y))
    if scale == 0:
        return Correlation(None, None, n, "no variation among the runs that can be compared")
    rho = float(np.clip(ranks_x @ ranks_y / scale, -1, 1))
    return Correlation(rho, _p_value(rho, ranks_x, ranks_y, scale, groups), n)


def noise(results: npt.ArrayLike) -> Noise | None:
    """Return the noise in results [methods, seeds], taken to be the same for all methods.

    s² = Σ (y_ms − ȳ_m − ȳ_s + ȳ)² / ((M − 1)(S − 1)) over M methods m and S seeds s. With two
    seeds a pair of methods says next to nothing of its own noise; all methods together do. None for
    one method or one seed.

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
        known: the noise of the two whose differences these are, which have twice its variance; else
            s² is taken from the values.

    >>> low, high = interval([1.0, 2.0, 3.0])[1:3]
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    """
    a = np.asarray(values, np.float64)
    mean = float(a.mean())
    if known is None and len(a) < 2:
        return Interval(mean, None, None, len(a))
    variance, freedom = (
        (float(a.var(ddof=1)), len(a) - 1) if known is None else (2 * known.variance, known.freedom)
    )
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance / len(a))
    return Interval(mean, mean - half, mean + half, len(a))


def fit(x: npt.ArrayLike, y: npt.ArrayLike) -> Fit | None:
    """Return the line through points by least squares; None where there is none.

    >>> fit([0, 1, 2], [1, 3, 5])
    Fit(slope=2.0, intercept=1.0, r2=1.0, runs=3)
    """
    values_x, values_y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(values_x) < 3 or np.ptp(values_x) == 0:
        return None
    dx, dy = values_x - values_x.mean(), values_y - values_y.mean()
    slope = float(dx @ dy / (dx @ dx))
    total = float(dy @ dy)
    left = dy - slope * dx
    r2 = 1 - float(left @ left) / total if total else 1.0
    intercept = float(values_y.mean() - slope * values_x.mean())
    return Fit(slope, intercept, r2, len(values_x))


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
    apart = difference != 0  # a touch is no crossing
    grid, difference = grid[apart], difference[apart]
    where = np.flatnonzero(np.sign(difference[:-1]) != np.sign(difference[1:]))
    share = difference[where] / (difference[where] - difference[where + 1])
    return (grid[where] + share * (grid[where + 1] - grid[where])).tolist()


def _positions(strata: Sequence[object]) -> list[npt.NDArray[np.int64]]:
    places: dict[object, list[int]] = {}
    for place, stratum in enumerate(strata):
        places.setdefault(stratum, []).append(place)
    return [np.array(of_stratum) for of_stratum in places.values()]


def _ranks(values: FloatArray, groups: list[npt.NDArray[np.int64]]) -> FloatArray:
    ranks = np.empty(len(values))
    for group in groups:
        within = np.asarray(stats.rankdata(values[group]))
        ranks[group] = within - within.mean()
    return ranks


def _p_value(
    rho: float,
    ranks_x: FloatArray,
    ranks_y: FloatArray,
    scale: float,
    groups: list[npt.NDArray[np.int64]],
) -> float:
    n = len(ranks_x)
    if len(groups) == 1 and n > _EXACT_UP_TO:
        if abs(rho) == 1:
            return 0.0
        t = rho * math.sqrt((n - 2) / (1 - rho**2))
        return float(2 * stats.t.sf(abs(t), n - 2))
    if n > _RANDOM_UP_TO:
        parts = [(ranks_x[group], ranks_y[group]) for group in groups if len(group) > 1]
        variance = sum(float((x @ x) * (y @ y)) / (len(x) - 1) for x, y in parts)
        return float(2 * stats.norm.sf(abs(rho) * scale / math.sqrt(variance)))
    if len(groups) == 1:
        orders = np.array(list(itertools.permutations(range(n))))
        others = ranks_y[orders]
    else:
        generator = np.random.default_rng(0)
        others = np.tile(ranks_y, (_PERMUTATIONS + 1, 1))  # the first stays as it is
        for group in groups:
            others[1:, group] = generator.permuted(others[1:, group], axis=1)
    as_far = np.abs(others @ ranks_x / scale) >= abs(rho) - 1e-12
    return float(as_far.mean())
