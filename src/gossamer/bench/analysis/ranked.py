"""Ranks within strata, and the slopes at which a rank correlation crosses a threshold.

scipy's ``spearmanr`` has no strata, and would be called for each of thousands of permuted results,
which are ranked in one vectorized call here.
"""

from __future__ import annotations

import itertools
import math
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from gossamer.topology.arrays import FloatArray

IntArray: TypeAlias = npt.NDArray[np.int64]

ROUNDING = 1e-9
"""Numbers whose relative difference is smaller count as equal."""

_DRAWS = 200


@final
class Ranked:
    """A result and quantities, ranked within strata."""

    def __init__(
        self, y_C: FloatArray, x_CT: FloatArray, unit_C: IntArray, stratum_C: IntArray
    ) -> None:
        self._unit_C, self._stratum_C = unit_C, stratum_C
        self._strata = [stratum_C == stratum for stratum in range(int(stratum_C.max()) + 1)]
        cells = [np.flatnonzero(here) for here in self._strata]
        pairs = [pair for own in cells for pair in itertools.combinations(own, 2)]
        self._pairs = np.array(pairs, np.int64).T
        self.y_C, self.x_CT = y_C, x_CT
        self.ranks_C, self.ranks_CT = self._of(y_C[None])[0], self._of(x_CT.T).T

    def rho(self, values_KC: FloatArray, number: int) -> FloatArray:
        """Return the correlation of each of K results with one quantity."""
        return self._of(values_KC) @ self.ranks_CT[:, number]

    def line(self, number: int, values_KC: FloatArray, least: float) -> FloatArray:
        """Return for each of K results the largest slope b at which y − b·x has a rho ≥ ``least``.

        Rho decreases with b, and changes only where two cells of a stratum change their order; so a
        binary search among the slopes between pairs of cells finds it. Infinite if b is unbounded.
        """
        x_C = self.x_CT[:, number]
        first, second = self._pairs
        apart = self.ranks_CT[first, number] != self.ranks_CT[second, number]
        first, second = first[apart], second[apart]
        slopes_KB = np.sort(
            (values_KC[:, first] - values_KC[:, second]) / (x_C[first] - x_C[second]), axis=1
        )
        beyond = 1 + np.abs(slopes_KB).max(1, keepdims=True)
        ends_KB = np.concatenate([-2 * beyond, slopes_KB, 2 * beyond], axis=1)
        between_KB = (ends_KB[:, 1:] + ends_KB[:, :-1]) / 2
        rows = np.arange(len(values_KC))
        low, high = np.full(len(rows), -1), np.full(len(rows), between_KB.shape[1])
        while np.any(high - low > 1):  # invariant: rho reaches ``least`` at low, and not at high
            middle = (low + high) // 2
            going = high - low > 1
            slope_K = between_KB[rows, np.where(going, middle, 0)]
            reached = self.rho(values_KC - slope_K[:, None] * x_C, number) >= least
            low = np.where(going & reached, middle, low)
            high = np.where(going & ~reached, middle, high)
        found = ends_KB[rows, low + 1]
        return np.select([low < 0, low == between_KB.shape[1] - 1], [-np.inf, np.inf], found)

    def noise(self, left_C: FloatArray, generator: np.random.Generator) -> FloatArray:
        """Return normal noise with the variance over units and the covariance over strata of the
        residuals of a line, which have two degrees of freedom fewer than there are units.
        """
        num_units = int(self._unit_C.max()) + 1
        left_US = np.zeros((num_units, len(self._strata)))
        for number, here in enumerate(self._strata):
            own = left_C[here] - left_C[here].mean()
            left_US[self._unit_C[here], number] = own / math.sqrt(max(1, len(own) - 2))
        drawn_KUU = generator.normal(size=(_DRAWS, num_units, num_units))
        return (drawn_KUU @ left_US)[:, self._unit_C, self._stratum_C]

    def _of(self, values_KC: FloatArray) -> FloatArray:
        """Return centred ranks, scaled to a norm of 1; values that differ by rounding are tied."""
        ranks = np.empty(values_KC.shape)
        for here in self._strata:
            own = values_KC[:, here]
            over = own[:, :, None] - own[:, None, :]
            # A sum in another order changes the last digits: such differences are ties.
            over[np.abs(over) <= ROUNDING * np.abs(own).max(1)[:, None, None]] = 0
            ranks[:, here] = np.sign(over).sum(2) / 2
        size = np.sqrt((ranks**2).sum(1, keepdims=True))
        return ranks / np.where(size > 0, size, 1)
