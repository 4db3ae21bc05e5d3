"""Communication rounds: who mixes with whom, and with which weight.

A Round is a value. It knows nothing of processes: the simulator reads it as a matrix, gossip as
sends and receives, the runtime model as messages on links, the report as a picture. All it holds
is one frozen sparse matrix, so a round on a thousand workers costs a few arrays and never a Python
object per edge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast, final

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from gossamer.errors import UserError

AnyArray = TypeVar("AnyArray", bound=npt.NDArray[Any])
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Sparse: TypeAlias = "csr_array[np.float64, tuple[int, int]]"

# Weights are sums and quotients of small integers: an honest row misses one by rounding error only.
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
    """A round in which all workers do the same: W[i, i + s mod n] = w for every i, s and its w."""

    distances: IntArray
    """Each s, ascending from 0 to n − 1."""

    weights: FloatArray


@final
class Round:
    """One communication round, x_i ← Σ_j W_ij x_j.

    Args:
        weights: the mixing matrix W; W[i, j] is the weight worker i gives to j's parameters.
        doubly_stochastic: whether columns must sum to one as well, so that mixing conserves the
            mean. Pass False to declare a round that does not.
    """

    def __init__(self, weights: Sparse, *, doubly_stochastic: bool = True) -> None:
        w = self._weights = _canonical(weights)
        _check_stochastic(w, doubly_stochastic)
        for array in (w.data, w.indices, w.indptr):
            _freeze(array)

    @property
    def num_workers(self) -> int:
        """How many workers take part."""
        return self._weights.shape[0]

    def matrix(self) -> Sparse:
        """Return W, with W[i, j] the weight worker i gives to worker j's parameters (read-only)."""
        w = self._weights
        return cast("Sparse", csr_array((w.data, w.indices, w.indptr), shape=w.shape))

    def neighbours(self, worker: int) -> Neighbours:
        """Return what one worker receives and sends in this round."""
        if not 0 <= worker < self.num_workers:
            raise UserError(
                f"worker must be in 0..{self.num_workers - 1}, got {worker}; "
                f"this round has {self.num_workers} workers"
            )
        self_weight, receives = _split_row(self._weights, worker)
        _, sends = _split_row(self._transpose, worker)
        return Neighbours(self_weight, receives, sends)

    @cached_property
    def in_degrees(self) -> IntArray:
        """How many others each worker receives from."""
        return _freeze(_others_per_row(self._weights))

    @cached_property
    def out_degrees(self) -> IntArray:
        """How many others each worker sends to."""
        return _freeze(_others_per_row(self._transpose))

    @property
    def degree(self) -> int:
        """The most neighbours any worker receives from or sends to."""
        return int(max(self.in_degrees.max(), self.out_degrees.max()))

    @cached_property
    def symmetric(self) -> bool:
        """Whether W equals its transpose: every exchange goes both ways with one weight."""
        return self._support_is_symmetric and np.allclose(
            self._weights.data, self._transpose.data, rtol=0, atol=TOLERANCE
        )

    @cached_property
    def conserves_mean(self) -> bool:
        """Whether W is doubly stochastic: mixing moves workers, never their average."""
        return np.allclose(self._weights.sum(axis=0), 1.0, rtol=0, atol=TOLERANCE)

    @cached_property
    def shifts(self) -> Shifts | None:
        """How far away the workers are that each one mixes with; None where rows of W differ."""
        w, n = self._weights, self.num_workers
        degree, rest = divmod(w.nnz, n)
        if rest or np.any(np.diff(w.indptr) != degree):
            return None
        distances = (w.indices.reshape(n, degree) - np.arange(n)[:, None]) % n
        order = np.argsort(distances, axis=1)
        distances = np.take_along_axis(distances, order, axis=1)
        weights = np.take_along_axis(w.data.reshape(n, degree), order, axis=1)
        if np.any(distances != distances[0]) or np.any(weights != weights[0]):
            return None
        # Copies: one row must not keep the arrays of all.
        return Shifts(_freeze(distances[0].copy()), _freeze(weights[0].copy()))

    def groups(self) -> tuple[IntArray, ...] | None:
        """Return the cliques, if the round averages uniformly within a partition of the workers.

        Such a round can run as one all-reduce per group. Groups are ordered by their first member;
        a worker that keeps everything is a group of one. None if the round is anything else.
        """
        labels = self._group_labels
        if labels is None:
            return None
        order = np.argsort(labels, kind="stable")
        starts = np.flatnonzero(np.diff(labels[order])) + 1
        return tuple(np.split(order, starts))

    def group_of(self, worker: int) -> IntArray | None:
        """Return the members of one worker's group, without building the others; see groups()."""
        labels = self._group_labels
        return None if labels is None else np.flatnonzero(labels == labels[worker])

    @cached_property
    def messages_sent(self) -> IntArray:
        """Messages each worker sends: one per receiver, or 2(g − 1) to all-reduce in a group of g.

        Groups of two exchange one message each way; larger ones all-reduce.
        """
        reduced = self._group_labels is not None
        return _freeze(
            np.where(reduced & (self.out_degrees > 1), 2 * self.out_degrees, self.out_degrees)
        )

    @cached_property
    def copies_sent(self) -> FloatArray:
        """Model copies each worker sends: one per receiver, or 2(g − 1)/g in a group of g."""
        if self._group_labels is None:
            return _freeze(self.out_degrees.astype(np.float64))
        return _freeze(2 * self.out_degrees / (self.out_degrees + 1))

    @cached_property
    def digest(self) -> str:
        """A short hash of the weights, the same in every process, to compare rounds by.

        Weights count to twelve decimals: two ways to compute 1/3 make one round.
        """
        w = self._weights
        parts = (w.indptr.astype(np.int64), w.indices.astype(np.int64), w.data.round(12))
        return hashlib.blake2b(b"".join(p.tobytes() for p in parts), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Round) and self.digest == other.digest

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __reduce__(self) -> tuple[Any, ...]:
        # Arrays do not stay read-only through a pickle or a copy; a new round freezes them again.
        return partial(Round, doubly_stochastic=self.conserves_mean), (self._weights,)

    def __repr__(self) -> str:
        return f"Round({self.num_workers} workers, degree {self.degree})"

    @cached_property
    def _transpose(self) -> Sparse:
        return self._weights.T.tocsr()

    @cached_property
    def _support_is_symmetric(self) -> bool:
        return np.array_equal(self._weights.indptr, self._transpose.indptr) and np.array_equal(
            self._weights.indices, self._transpose.indices
        )

    @cached_property
    def _group_labels(self) -> IntArray | None:
        """The first member of each worker's group, or None where the round is not a partition.

        It is one exactly when every row holds as many entries as there are workers that share its
        first member, all entries of a row share that first member, and all weigh the same: then
        equal rows and nothing but equal rows form the groups.
        """
        w = self._weights
        sizes = np.diff(w.indptr)
        labels = w.indices[w.indptr[:-1]].astype(np.int64)
        same_group = np.array_equal(labels[w.indices], np.repeat(labels, sizes))
        whole_group = np.array_equal(np.bincount(labels, minlength=self.num_workers)[labels], sizes)
        uniform = np.allclose(w.data, np.repeat(1.0 / sizes, sizes), rtol=0, atol=TOLERANCE)
        return labels if same_group and whole_group and uniform else None


def digest_of(rounds: Iterable[Round]) -> str:
    """Return a short hash of rounds in their order, the same in every process."""
    digests = "".join(round.digest for round in rounds)
    return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()


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


def _check_stochastic(weights: Sparse, doubly: bool) -> None:
    if not np.all(weights.data >= 0):  # also false for NaN
        raise UserError(
            f"mixing weights must be non-negative numbers, got {weights.data.min()}; "
            "build the round with topology.weights.uniform or metropolis"
        )
    _check_sums(weights.sum(axis=1), "row", "divide each row by its sum")
    if doubly:
        remedy = (
            "use topology.weights.metropolis, which conserves the mean, or pass "
            "doubly_stochastic=False to declare a round that does not"
        )
        _check_sums(weights.sum(axis=0), "column", remedy)


def _check_sums(sums: FloatArray, what: str, remedy: str) -> None:
    worst = int(np.argmax(np.abs(sums - 1.0)))
    if not abs(sums[worst] - 1.0) <= TOLERANCE:
        raise UserError(
            f"every {what} of a mixing matrix must sum to 1, got {sums[worst]:.9g} "
            f"in {what} {worst}; {remedy}"
        )


def _freeze(array: AnyArray) -> AnyArray:
    array.flags.writeable = False
    return array


def _others_per_row(matrix: Sparse) -> IntArray:
    return np.diff(matrix.indptr) - (matrix.diagonal() != 0)


def _split_row(matrix: Sparse, row: int) -> tuple[float, Edges]:
    """Return the diagonal entry of a row and its other entries."""
    entries = slice(matrix.indptr[row], matrix.indptr[row + 1])
    workers = matrix.indices[entries].astype(np.int64)
    weights = matrix.data[entries]
    other = workers != row
    return float(weights[~other].sum()), Edges(workers[other], weights[other])
