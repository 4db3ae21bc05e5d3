"""Workers far outside the usual distance from the others, estimated from sketches."""

# n: workers, m: floats in a sketch

from __future__ import annotations

import logging
from typing import final

import numpy as np

from gossamer.topology.arrays import FloatArray

_ABSURD = 100.0
"""Multiple of the median distance beyond which a worker is reported."""


def relative_distances(sketches_nm: FloatArray) -> FloatArray:
    """Return each worker's distance from the median of all, in units of the median distance, [n].

    Medians, because one outlier moves a mean. NaN where a sketch is not finite; zeros where most
    workers are equal, or there are two, of which neither is the outlier.

    >>> relative_distances(np.array([[0.0], [1.0], [2.0], [3.0], [1002.0]])).tolist()
    [2.0, 1.0, 0.0, 1.0, 1000.0]
    """
    finite_n = np.isfinite(sketches_nm).all(axis=1)
    known = sketches_nm[finite_n]
    relative_n = np.where(finite_n, 0.0, np.nan)
    if len(known) < 3:
        return relative_n
    with np.errstate(over="ignore"):
        distances = np.linalg.norm(known - np.median(known, axis=0), axis=1)
    usual = np.median(distances)
    if usual > 0:
        relative_n[finite_n] = distances / usual
    return relative_n


@final
class OutlierWatch:
    """Warns once about each worker that is far outside the distance of the others.

    Args:
        kind: what a worker is called, such as "rank".
        log: where to warn.
    """

    def __init__(self, kind: str, log: logging.Logger) -> None:
        self._kind = kind
        self._log = log
        self._said: set[int] = set()

    def look(self, sketches_nm: FloatArray) -> FloatArray:
        """Check the sketches of all workers' parameters, and return them."""
        relative_n = relative_distances(sketches_nm)
        for worker in np.flatnonzero(relative_n > _ABSURD).tolist():
            if worker not in self._said:
                self._said.add(worker)
                self._log.warning(
                    "the parameters of %s %d are %.3g times as far from the others as these "
                    "usually are: check its learning rate, gradients and data",
                    self._kind,
                    worker,
                    relative_n[worker],
                )
        return sketches_nm
