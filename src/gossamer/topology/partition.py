"""Rounds in which workers average within groups, stored as one label per worker.

The matrix of such a round has g entries for each member of a group of g, so that an average of all
n workers would take n² numbers. The labels carry the same information in n, and where all are equal
in one.
"""

# n: workers, N: numbers per worker

from __future__ import annotations

from typing import Any, cast, final

import numpy as np
from scipy.sparse import csr_array

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
class Partition:
    """Disjoint groups that cover all workers; every member weighs 1/g in a group of g.

    It has the read interface of ``MixingMatrix``; ``Round`` documents the methods.

    Args:
        labels: an integer for each worker; workers with the same label form a group.
    """

    symmetric = True
    conserves_mean = True
    keeps_consensus = True

    def __init__(self, labels: IntArray) -> None:
        _, first, group = np.unique(labels, return_index=True, return_inverse=True)
        self.num_workers = len(labels)
        self.num_groups = len(first)
        self.labels: IntArray = freeze(first[group])
        """The first member of each worker's group."""
        if self.num_groups == 1:  # one number, seen by all: a view without memory of its own
            self.labels = np.broadcast_to(np.int64(0), self.num_workers)

    @classmethod
    def whole(cls, num_workers: int) -> Partition:
        """Return the partition in which all workers are one group."""
        return cls(np.broadcast_to(np.int64(0), num_workers))

    @classmethod
    def read(cls, weights: Sparse) -> Partition | None:
        """Return the groups that a mixing matrix averages within, or None if it is anything else.

        It is a partition exactly when every row holds as many entries as there are workers that
        share its first member, all entries of a row share that first member, and all weigh the
        same: then equal rows and nothing but equal rows form the groups.
        """
        sizes = np.diff(weights.indptr)
        labels = weights.indices[weights.indptr[:-1]].astype(np.int64)
        same_group = np.array_equal(labels[weights.indices], np.repeat(labels, sizes))
        whole_group = np.array_equal(np.bincount(labels, minlength=len(labels))[labels], sizes)
        uniform = np.allclose(weights.data, np.repeat(1.0 / sizes, sizes), rtol=0, atol=TOLERANCE)
        return cls(labels) if same_group and whole_group and uniform else None

    @property
    def sizes(self) -> IntArray:
        """How many members each worker's group has, itself included."""
        if self.num_groups == 1:
            return np.broadcast_to(np.int64(self.num_workers), self.num_workers)
        return np.bincount(self.labels, minlength=self.num_workers)[self.labels]

    @property
    def in_degrees(self) -> IntArray:
        """How many others each worker receives from."""
        return self.sizes - 1

    out_degrees = in_degrees

    @property
    def self_weights(self) -> FloatArray:
        """The weight each worker keeps on its own parameters."""
        return 1.0 / self.sizes

    @property
    def is_connected(self) -> bool:
        """Whether information reaches every other worker: all are in one group."""
        return self.num_groups == 1

    @property
    def shifts(self) -> Shifts | None:
        """Multiples of n/g where groups are the cosets of that stride: the only circulant ones."""
        n, stride = self.num_workers, self.num_groups
        if n % stride or np.any(self.labels != np.arange(n) % stride):
            return None
        distances = np.arange(0, n, stride)
        return Shifts(freeze(distances), freeze(np.full(len(distances), 1.0 / len(distances))))

    def groups(self) -> tuple[IntArray, ...]:
        """Return the members of each group, ordered by their first one."""
        members, bounds = self._by_group()
        return tuple(np.split(members, bounds[1:-1]))

    def members_with(self, worker: int) -> IntArray:
        """Return the members of one worker's group."""
        return np.flatnonzero(self.labels == self.labels[worker])

    def neighbours(self, worker: int) -> Neighbours:
        """Return what one worker receives and sends."""
        members = self.members_with(worker)
        share = 1.0 / len(members)
        others = Edges(members[members != worker], np.full(len(members) - 1, share))
        return Neighbours(share, others, others)

    def mixed(self, x_nN: FloatArray) -> FloatArray:
        """Return W x, computed once per group; bit for bit the product with ``matrix()``."""
        members, bounds = self._by_group()
        sizes = np.diff(bounds)
        shares = np.repeat(1.0 / sizes, sizes)
        rows = csr_array((shares, members, bounds), shape=(len(sizes), self.num_workers))
        means = np.asarray(rows @ x_nN)
        mixed = np.empty((self.num_workers, *means.shape[1:]), means.dtype)
        mixed[members] = np.repeat(means, sizes, axis=0)
        return mixed

    def without(self, away: BoolArray) -> Partition:
        """Return the partition in which the groups of these workers are split into single ones."""
        labels = self.labels.copy()
        dissolved = np.isin(labels, labels[away])
        labels[dissolved] = np.flatnonzero(dissolved)
        return Partition(labels)

    def matrix(self) -> Sparse:
        """Return W: g entries for each member of a group of g, rebuilt at every call."""
        members, bounds = self._by_group()
        sizes = self.sizes
        # Where each worker's group begins among the members, then in the rows of the matrix.
        begins = bounds[np.searchsorted(members[bounds[:-1]], self.labels)]
        row_starts = np.concatenate([[0], np.cumsum(sizes)])
        position = np.arange(row_starts[-1]) + np.repeat(begins - row_starts[:-1], sizes)
        arrays = np.repeat(1.0 / sizes, sizes), members[position], row_starts
        shape = self.num_workers, self.num_workers
        return cast("Sparse", csr_array(tuple(map(freeze, arrays)), shape=shape))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle would write a broadcast view of one number out in full.
        whole = self.num_groups == 1
        return (Partition.whole, (self.num_workers,)) if whole else (Partition, (self.labels,))

    def _by_group(self) -> tuple[IntArray, IntArray]:
        """Return all workers, group by group, and where among them each group begins and ends."""
        members = np.argsort(self.labels, kind="stable")
        ends = np.flatnonzero(np.diff(self.labels[members])) + 1
        return members, np.concatenate([[0], ends, [self.num_workers]])
