"""Rounds with arbitrary weights, stored as one read-only sparse matrix."""

# n: workers, N: numbers per worker

from __future__ import annotations

from functools import cached_property
from typing import cast, final

import numpy as np
from scipy.sparse import csr_array, diags_array

from gossamer.errors import UserError
from gossamer.topology.arrays import (
    TOLERANCE,
    BoolArray,
    Edges,
    FloatArray,
    IntArray,
    Neighbours,
    Shifts,
    Sparse,
    freeze,
)


@final
class MixingMatrix:
    """A stochastic mixing matrix; ``Round`` documents the methods.

    Args:
        weights: W; copied, so that a caller cannot change the round later.
        rows: whether rows must sum to one.
        columns: whether columns must.
    """

    def __init__(self, weights: Sparse, *, rows: bool, columns: bool) -> None:
        self.weights = _canonical(weights)
        _check_stochastic(self.weights, rows=rows, columns=columns)
        for array in (self.weights.data, self.weights.indices, self.weights.indptr):
            freeze(array)

    @property
    def num_workers(self) -> int:
        """How many workers take part."""
        return self.weights.shape[0]

    @property
    def in_degrees(self) -> IntArray:
        """How many others each worker receives from."""
        return _others_per_row(self.weights)

    @property
    def out_degrees(self) -> IntArray:
        """How many others each worker sends to."""
        return _others_per_row(self._transpose)

    @property
    def self_weights(self) -> FloatArray:
        """The weight each worker keeps on its own parameters."""
        return self.weights.diagonal()

    @property
    def symmetric(self) -> bool:
        """Whether W equals its transpose."""
        w, t = self.weights, self._transpose
        same_support = np.array_equal(w.indptr, t.indptr) and np.array_equal(w.indices, t.indices)
        return same_support and np.allclose(w.data, t.data, rtol=0, atol=TOLERANCE)

    @property
    def conserves_mean(self) -> bool:
        """Whether columns sum to one."""
        return np.allclose(self.weights.sum(axis=0), 1.0, rtol=0, atol=TOLERANCE)

    @property
    def keeps_consensus(self) -> bool:
        """Whether rows sum to one."""
        return np.allclose(self.weights.sum(axis=1), 1.0, rtol=0, atol=TOLERANCE)

    @property
    def is_connected(self) -> bool:
        """Whether the graph is strongly connected: information reaches every other worker."""
        return is_connected(self.weights)

    @property
    def shifts(self) -> Shifts | None:
        """W as shifts that all workers share; None where W is not circulant."""
        w, n = self.weights, self.num_workers
        degree, rest = divmod(w.nnz, n)
        if rest or np.any(np.diff(w.indptr) != degree):
            return None
        distances = (w.indices.reshape(n, degree) - np.arange(n)[:, None]) % n
        order = np.argsort(distances, axis=1)
        distances = np.take_along_axis(distances, order, axis=1)
        weights = np.take_along_axis(w.data.reshape(n, degree), order, axis=1)
        if np.any(distances != distances[0]) or np.any(weights != weights[0]):
            return None
        # Copies: a view of one row would keep the arrays of the whole matrix alive.
        return Shifts(freeze(distances[0].copy()), freeze(weights[0].copy()))

    def neighbours(self, worker: int) -> Neighbours:
        """Return what one worker receives and sends."""
        self_weight, receives = _split_row(self.weights, worker)
        _, sends = _split_row(self._transpose, worker)
        return Neighbours(self_weight, receives, sends)

    def mixed(self, x_nN: FloatArray) -> FloatArray:
        """Return W x."""
        return cast(FloatArray, self.weights @ x_nN)

    def matrix(self) -> Sparse:
        """Return W as a new object, so that changing it leaves the round as it is."""
        w = self.weights
        return cast("Sparse", csr_array((w.data, w.indices, w.indptr), shape=w.shape))

    @cached_property
    def _transpose(self) -> Sparse:
        return self.weights.T.tocsr()


def is_connected(weights: Sparse) -> bool:
    """Whether the graph is strongly connected: information reaches every other worker."""
    from scipy.sparse.csgraph import connected_components  # slow to import; many rounds need none

    # Strong components; on an undirected graph they are the components. A copy, because the
    # search does not take the read-only arrays of a round.
    num_components, _ = connected_components(weights.copy(), directed=True, connection="strong")
    return num_components == 1


def without(weights: Sparse, away: BoolArray, *, keep: bool) -> Sparse:
    """Return the weights of a round in which some workers take no part.

    Args:
        weights: any mixing matrix.
        away: a mask of the workers that are left out.
        keep: whether the others add the weight of those to their own parameters.
    """
    receivers = np.repeat(np.arange(len(away)), np.diff(weights.indptr))
    exchanged = np.where(away[receivers] | away[weights.indices], 0.0, weights.data)
    others = csr_array((exchanged, weights.indices, weights.indptr), shape=weights.shape)
    towards_them = cast(FloatArray, weights @ away.astype(np.float64))
    kept = np.where(away, 1.0, towards_them if keep else 0.0)
    return cast("Sparse", csr_array(others + diags_array(kept)))


def _canonical(matrix: Sparse) -> Sparse:
    """Return a float64 copy with sorted indices and without stored zeros."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise UserError(
            f"a mixing matrix must be square with at least one worker, got shape {matrix.shape}; "
            "give one row and one column per worker"
        )
    weights = csr_array(matrix).astype(np.float64)
    weights.sum_duplicates()
    weights.eliminate_zeros()
    return weights


def _check_stochastic(weights: Sparse, *, rows: bool, columns: bool) -> None:
    if not np.all(weights.data >= 0):  # also false for NaN
        raise UserError(
            f"mixing weights must be non-negative numbers, got {weights.data.min()}; "
            "build the round with topology.weights.uniform or metropolis"
        )
    if rows:
        _check_sums(weights.sum(axis=1), "row", "divide each row by its sum")
    if columns:
        remedy = (
            "use topology.weights.metropolis, which conserves the mean, or pass "
            "doubly_stochastic=False to declare a round that does not"
        )
        _check_sums(weights.sum(axis=0), "column", remedy if rows else "divide it by its sum")


def _check_sums(sums: FloatArray, what: str, remedy: str) -> None:
    worst = int(np.argmax(np.abs(sums - 1.0)))
    if not abs(sums[worst] - 1.0) <= TOLERANCE:
        raise UserError(
            f"every {what} of a mixing matrix must sum to 1, got {sums[worst]:.9g} "
            f"in {what} {worst}; {remedy}"
        )


def _others_per_row(matrix: Sparse) -> IntArray:
    return np.diff(matrix.indptr) - (matrix.diagonal() != 0)


def _split_row(matrix: Sparse, row: int) -> tuple[float, Edges]:
    """Return the diagonal entry of a row and its other entries."""
    entries = slice(matrix.indptr[row], matrix.indptr[row + 1])
    workers = matrix.indices[entries].astype(np.int64)
    weights = matrix.data[entries]
    other = workers != row
    return float(weights[~other].sum()), Edges(workers[other], weights[other])
