"""Views of a round: arrays over workers, one worker's neighbours, and circulant shifts."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

AnyArray = TypeVar("AnyArray", bound=npt.NDArray[Any])
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Sparse: TypeAlias = "csr_array[np.float64, tuple[int, int]]"

# Weights are sums and quotients of small integers: a stochastic row sums to 1 up to rounding error.
TOLERANCE = 1e-9


class Edges(NamedTuple):
    """Other workers, ascending, and the weight on the edge to or from each."""

    workers: IntArray
    weights: FloatArray


class Neighbours(NamedTuple):
    """One worker's part in a round."""

    self_weight: float
    """Weight the worker keeps on its own parameters."""

    receives: Edges
    """From whom it receives, and the weight it gives to each."""

    sends: Edges
    """To whom it sends, and the weight each of them gives to it."""


class Shifts(NamedTuple):
    """A circulant round: W[i, i + s mod n] = w for every i, and each shift s of weight w."""

    distances: IntArray
    """Each s, ascending from 0 to n − 1."""

    weights: FloatArray


def freeze(array: AnyArray) -> AnyArray:
    """Return the array, made read-only: a Round is hashed and shared, so it must never change."""
    array.flags.writeable = False
    return array
