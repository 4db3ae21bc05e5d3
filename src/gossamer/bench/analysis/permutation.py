"""A stratified permutation test: the correlation of results with a property of their units.

A cell is the mean over seeds of one *unit*, such as a graph, in one *stratum*, such as a scale.
Under the null hypothesis the units are exchangeable, each with its results in all strata: what
makes a graph good at one scale may make it good at all. So one permutation of units is applied to
every stratum, and seeds and strata do not add independent observations.

Units are exchanged with those that have cells in the same strata. If there are few permutations all
are used, otherwise random ones with a fixed seed, the first of which is the identity: the p-value
(1 + as extreme) / (1 + permutations) is valid for any number of them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gossamer.bench.analysis.ranked import ROUNDING, IntArray, Ranked
from gossamer.topology.arrays import FloatArray

FEWEST = 5
"""The fewest units for a verdict: for four, a perfect order has a two-sided p of 0.083."""

LEVEL = 0.05
POWER = 0.8

_MOST_EXACT = math.factorial(8)
_RANDOM = 9999


class Association(NamedTuple):
    """The correlation of a result with a quantity; fields are None where ``note`` says why."""

    rho: float | None = None
    """Spearman's rank correlation over cells, each ranked within its stratum."""

    p: float | None = None
    """Two-sided, corrected for all quantities that were tested together."""

    p_alone: float | None = None
    """Without the correction."""

    least_p: float | None = None
    """The p of a perfect order, the smallest possible with so few units."""

    slope: float | None = None
    """Change of the result per unit of the quantity: the slope b for which y − b·x has no rank
    correlation with x."""

    slope_low: float | None = None
    slope_high: float | None = None
    """Slopes that the test does not reject, at the level at which p is 0.05."""

    detectable: float | None = None
    """The slope that four of five such experiments would detect."""

    units: int = 0
    note: str = ""


def associations(
    units: Sequence[Hashable],
    strata: Sequence[Hashable],
    result_C: npt.ArrayLike,
    quantity_CT: npt.ArrayLike,
    noun: str = "graphs",
) -> list[Association]:
    """Test the correlation of a result with each of T quantities, together.

    Args:
        units: the unit of each of C cells; units are permuted.
        strata: the stratum of each cell; cells are compared within it.
        result_C: of each cell.
        quantity_CT: of each cell; slopes are per unit of it.
        noun: what units are called in notes.

    The correction is Westfall and Young's max-T: each correlation is compared with the largest of
    all T in each permutation, so correlated quantities cost little power.
    """
    num_tests = np.shape(quantity_CT)[1]
    num = len(set(itertools.compress(units, _compared(strata))))
    if num < 2:
        note = f"no two {noun} can be compared, and at least {FEWEST} are needed"
        return [Association(units=num, note=note)] * num_tests
    test = _Test(units, strata, result_C, quantity_CT)
    return [test.association(number, num, noun) for number in range(num_tests)]


def p_values(
    units: Sequence[Hashable],
    strata: Sequence[Hashable],
    result_C: npt.ArrayLike,
    quantity_CT: npt.ArrayLike,
) -> tuple[FloatArray, FloatArray]:
    """Return the p of each quantity, corrected and uncorrected, without slopes and intervals.

    >>> p_values([0, 1, 2, 3, 4], [0] * 5, [1, 2, 3, 4, 5], [[1], [2], [3], [4], [5]])[0]
    array([0.01666667])
    """
    test = _Test(units, strata, result_C, quantity_CT)
    return test.p_T, test.p_alone_T


class _Test:
    """The correlations of all quantities with a result, under all permutations."""

    def __init__(
        self,
        units: Sequence[Hashable],
        strata: Sequence[Hashable],
        result_C: npt.ArrayLike,
        quantity_CT: npt.ArrayLike,
    ) -> None:
        y, x = np.asarray(result_C, np.float64), np.asarray(quantity_CT, np.float64)
        compared = _compared(strata)
        unit_C, stratum_C = (_numbered(itertools.compress(of, compared)) for of in (units, strata))
        self._ranked = ranked = Ranked(y[compared], x[compared], unit_C, stratum_C)
        self._moved_PC = _moves(unit_C, stratum_C)
        self._rho_PT = ranked.ranks_C[self._moved_PC] @ ranked.ranks_CT
        self._far_P = np.abs(self._rho_PT).max(1)
        self._critical = _critical(self._far_P)
        as_far_T = np.abs(self._rho_PT[0]) - ROUNDING
        self.p_T: FloatArray = (self._far_P[:, None] >= as_far_T).mean(0)
        self.p_alone_T: FloatArray = (np.abs(self._rho_PT) >= as_far_T).mean(0)

    def association(self, number: int, num: int, noun: str) -> Association:
        """Return the association with one quantity."""
        own_P, ranked = self._rho_PT[:, number], self._ranked
        if not np.any(np.abs(own_P) > ROUNDING):
            note = f"no variation among the {noun} that can be compared"
            return Association(units=num, note=note)
        rho = float(np.clip(own_P[0], -1, 1))
        perfect_PT = ranked.ranks_CT[:, number][self._moved_PC] @ ranked.ranks_CT
        perfect_P = np.abs(perfect_PT).max(1)
        least_p = float((perfect_P >= 1 - ROUNDING).mean())
        y = ranked.y_C[None]
        above, below = ranked.line(number, y, ROUNDING)[0], -ranked.line(number, -y, ROUNDING)[0]
        slope = float(above + below) / 2
        found = Association(rho, least_p=least_p, slope=slope, units=num)
        if num < FEWEST or least_p >= LEVEL:
            note = f"{num} {noun}: not even a perfect order has a p below {least_p:.2g}"
            return found._replace(note=note)
        least = self._critical - ROUNDING
        return found._replace(
            p=float(self.p_T[number]),
            p_alone=float(self.p_alone_T[number]),
            slope_low=_finite(ranked.line(number, y, least)[0]),
            slope_high=_finite(-ranked.line(number, -y, least)[0]),
            detectable=self._detectable(number, slope, _critical(perfect_P)),
        )

    def _detectable(self, number: int, slope: float, critical: float) -> float | None:
        """Return the slope that is detected with a power of 0.8, if noise is like the residuals.

        A slope is detected where it raises the correlation to a significant one. It also makes the
        strata more alike, which raises the critical value: ``critical`` is that of equal strata.
        """
        ranked = self._ranked
        left_C = ranked.y_C - slope * ranked.x_CT[:, number]
        noise_KC = ranked.noise(left_C, np.random.default_rng(0))
        needed_K = -ranked.line(number, noise_KC, max(self._critical, critical) - ROUNDING)
        return _finite(float(np.quantile(needed_K, POWER, method="higher")))


def _critical(far_P: FloatArray) -> float:
    """Return the smallest significant correlation; infinite if none is."""
    order = np.sort(far_P)
    # Of permutations with equal correlations either all are above the critical value, or none.
    last = order[len(order) - math.floor(LEVEL * len(order)) - 1]
    above = order[order > last + ROUNDING]
    return float(above[0]) if len(above) else math.inf


def _moves(unit_C: IntArray, stratum_C: IntArray) -> IntArray:
    """Return for each permutation and cell the cell whose result it gets; identity first."""
    num_units = int(unit_C.max()) + 1
    cell_of = np.full((num_units, int(stratum_C.max()) + 1), -1)
    cell_of[unit_C, stratum_C] = np.arange(len(unit_C))
    alike: dict[bytes, list[int]] = {}
    for unit in np.unique(unit_C):
        alike.setdefault((cell_of[unit] >= 0).tobytes(), []).append(int(unit))
    orders_PU = _orders(num_units, tuple(map(tuple, alike.values())))
    return cell_of[orders_PU[:, unit_C], stratum_C]


@lru_cache(maxsize=32)
def _orders(num_units: int, groups: tuple[tuple[int, ...], ...]) -> IntArray:
    """Return permutations within groups of units; the first is the identity."""
    if math.prod(math.factorial(len(group)) for group in groups) <= _MOST_EXACT:
        choices = itertools.product(*(itertools.permutations(group) for group in groups))
        places = np.concatenate([np.array(group, np.int64) for group in groups])
        chosen = np.array([list(itertools.chain(*choice)) for choice in choices])
        orders = np.tile(np.arange(num_units), (len(chosen), 1))
        orders[:, places] = chosen
        return orders
    generator = np.random.default_rng(0)
    orders = np.tile(np.arange(num_units), (_RANDOM + 1, 1))
    for group in groups:
        columns = np.array(group)
        orders[1:, columns] = generator.permuted(orders[1:, columns], axis=1)
    return orders


def _compared(strata: Sequence[Hashable]) -> list[bool]:
    """Return which cells are not alone in their stratum; a single one compares with nothing."""
    counts = Counter(strata)
    return [counts[stratum] > 1 for stratum in strata]


def _numbered(names: Iterable[Hashable]) -> IntArray:
    places: dict[Hashable, int] = {}
    return np.array([places.setdefault(name, len(places)) for name in names], np.int64)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
