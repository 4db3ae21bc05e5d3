"""Communication rounds: who mixes with whom, and with which weight.

A Round is an immutable value, independent of any process group: the simulator reads it as a matrix,
gossip as sends and receives, the runtime model as messages on links, the report as a picture. It
stores one read-only sparse matrix, or only the groups where workers average within groups: a round
on a thousand workers costs a few arrays, never a Python object per edge, and the average of all
workers is O(1) in their number.
"""

# n: workers, N: numbers per worker

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np

from gossamer.errors import UserError
from gossamer.topology.arrays import (
    BoolArray,
    FloatArray,
    IntArray,
    Neighbours,
    Shifts,
    Sparse,
    freeze,
)
from gossamer.topology.cost import SMALLEST_REDUCED, ring_copies, ring_messages
from gossamer.topology.mixing_matrix import MixingMatrix, without
from gossamer.topology.partition import Partition


class Messages(NamedTuple):
    """Who sends to whom, by index: ascending receivers, and ascending senders of each."""

    receivers: IntArray
    senders: IntArray


@final
class Round:
    """One communication round, x_i ← Σ_j W_ij x_j.

    Args:
        weights: the mixing matrix W; W[i, j] is the weight worker i gives to j's parameters.
        doubly_stochastic: whether columns must sum to one as well, so that mixing conserves the
            mean. Pass False to declare a round that does not.
        column_stochastic: whether columns sum to one and rows need not: each worker splits its
            parameters among its receivers, as push-sum does.
    """

    _form: MixingMatrix | Partition
    """What stores the weights. A matrix that happens to average in groups stays a matrix here."""

    def __init__(
        self, weights: Sparse, *, doubly_stochastic: bool = True, column_stochastic: bool = False
    ) -> None:
        self._form = MixingMatrix(
            weights, rows=not column_stochastic, columns=column_stochastic or doubly_stochastic
        )

    @classmethod
    def within(cls, partition: Partition) -> Round:
        """Return the round in which workers average within groups."""
        round = cls.__new__(cls)
        round._form = partition
        return round

    @classmethod
    def unchecked(cls, weights: Sparse) -> Round:
        """Return a round with any non-negative weights, rows and columns summing to anything."""
        round = cls.__new__(cls)
        round._form = MixingMatrix(weights, rows=False, columns=False)
        return round

    @property
    def num_workers(self) -> int:
        """How many workers take part."""
        return self._form.num_workers

    def matrix(self) -> Sparse:
        """Return W, with W[i, j] the weight worker i gives to worker j's parameters (read-only).

        The average of n workers has n² entries, built at each call; ``mixed``, ``self_weights``
        and ``neighbours`` do not need them.
        """
        return self._form.matrix()

    def mixed(self, x_nN: FloatArray) -> FloatArray:
        """Return W x: row i is Σ_j W_ij row j."""
        return self._form.mixed(x_nN)

    def neighbours(self, worker: int) -> Neighbours:
        """Return what one worker receives and sends in this round."""
        if not 0 <= worker < self.num_workers:
            raise UserError(
                f"worker must be in 0..{self.num_workers - 1}, got {worker}; "
                f"this round has {self.num_workers} workers"
            )
        return self._form.neighbours(worker)

    @cached_property
    def self_weights(self) -> FloatArray:
        """The weight each worker keeps on its own parameters: the diagonal of W."""
        return freeze(self._form.self_weights)

    @cached_property
    def in_degrees(self) -> IntArray:
        """How many others each worker receives from."""
        return freeze(self._form.in_degrees)

    @cached_property
    def out_degrees(self) -> IntArray:
        """How many others each worker sends to."""
        return freeze(self._form.out_degrees)

    @property
    def degree(self) -> int:
        """The most neighbours any worker receives from or sends to."""
        return int(max(self.in_degrees.max(), self.out_degrees.max()))

    @cached_property
    def symmetric(self) -> bool:
        """Whether W equals its transpose: every exchange goes both ways with one weight."""
        return self._form.symmetric

    @cached_property
    def conserves_mean(self) -> bool:
        """Whether columns sum to one: mixing leaves the mean of the workers where it is."""
        return self._form.conserves_mean

    @cached_property
    def keeps_consensus(self) -> bool:
        """Whether rows sum to one: mixing equal parameters leaves them equal and unchanged."""
        return self._form.keeps_consensus

    @cached_property
    def is_connected(self) -> bool:
        """Whether the graph is strongly connected: repeated, it mixes all workers."""
        return self._form.is_connected

    @cached_property
    def shifts(self) -> Shifts | None:
        """W as shifts that all workers share; None where W is not circulant."""
        return self._form.shifts

    def without(self, workers: Sequence[int]) -> Round:
        """Return the round with some workers left out: they neither send nor receive.

        Their neighbours add that weight to their own parameters, so rows still sum to one; groups
        that average exactly do not mix where a member is left out. The mean of the others is
        conserved where weights are symmetric. Where rows do not sum to one, that weight is lost.
        """
        away = np.zeros(self.num_workers, np.bool_)
        away[list(workers)] = True
        if self.partition is not None:
            return Round.within(self.partition.without(away))
        left = without(self.matrix(), away, keep=self.keeps_consensus)
        return Round.unchecked(left)

    # - Groups, and what is sent

    @property
    def averages_all(self) -> bool:
        """Whether one round gives every worker the mean of all."""
        return self.partition is not None and self.partition.num_groups == 1

    def groups(self) -> tuple[IntArray, ...] | None:
        """Return the cliques, if the round averages uniformly within a partition of the workers.

        Groups are ordered by their first member; a worker that keeps everything is a group of one.
        None if the round is anything else.
        """
        return None if self.partition is None else self.partition.groups()

    def group_of(self, worker: int) -> IntArray | None:
        """Return the members of one worker's group, without building the others; see groups()."""
        return None if self.partition is None else self.partition.members_with(worker)

    @cached_property
    def reduces(self) -> BoolArray:
        """Mask of the workers whose group all-reduces; the others exchange point to point."""
        if self.partition is None:
            return freeze(np.zeros(self.num_workers, np.bool_))
        return freeze(self.partition.sizes >= SMALLEST_REDUCED)

    def reduced_groups(self) -> tuple[IntArray, ...]:
        """Return the groups that all-reduce."""
        return tuple(members for members in self.groups() or () if self.reduces[members[0]])

    def messages(self) -> Messages:
        """Return the point-to-point messages, those outside of all-reduces."""
        workers = np.flatnonzero(~self.reduces)
        if not len(workers):
            return Messages(workers, workers)
        parts = self.partition
        w = self.matrix() if parts is None else Partition(parts.labels[workers]).matrix()
        rows = np.repeat(np.arange(len(workers)), np.diff(w.indptr))
        other = rows != w.indices
        return Messages(workers[rows[other]], workers[w.indices[other]])

    @cached_property
    def messages_sent(self) -> IntArray:
        """Messages each worker sends: one per receiver, or those of an all-reduce in its group."""
        return freeze(np.where(self.reduces, ring_messages(self.out_degrees + 1), self.out_degrees))

    @cached_property
    def copies_sent(self) -> FloatArray:
        """Model copies each worker sends: one per receiver, or those of an all-reduce."""
        return freeze(np.where(self.reduces, ring_copies(self.out_degrees + 1), self.out_degrees))

    # - Identity

    @cached_property
    def digest(self) -> str:
        """A short hash of the weights, equal in every process, for comparing rounds across ranks.

        It hashes the groups where there are any, otherwise the weights rounded to twelve decimals,
        so that two ways to compute 1/3 give the same digest.
        """
        if self.partition is not None:
            parts = (self.partition.labels,)
        else:
            w = self._form.matrix()
            parts = (w.indptr.astype(np.int64), w.indices.astype(np.int64), w.data.round(12))
        return hashlib.blake2b(b"".join(p.tobytes() for p in parts), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Round) and self.digest == other.digest

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling and copying drop numpy's read-only flag, and a Round is hashable: rebuild it, so
        # that its arrays are read-only in the copy too.
        if isinstance(self._form, Partition):
            return Round.within, (self._form,)
        return Round.unchecked, (self._form.weights,)

    def __repr__(self) -> str:
        return f"Round({self.num_workers} workers, degree {self.degree})"

    @cached_property
    def partition(self) -> Partition | None:
        """The groups as labels, where the round is a uniform average within groups."""
        form = self._form
        return form if isinstance(form, Partition) else Partition.read(form.weights)


def digest_of(rounds: Iterable[Round]) -> str:
    """Return a short hash of a sequence of rounds, equal in every process."""
    digests = "".join(round.digest for round in rounds)
    return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()
