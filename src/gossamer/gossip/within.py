"""The ranks within a node that hold one worker's replica together; gossip connects nodes.

Measurements of a worker (its distance from others, whether its parameters are finite) are over all
of its parameters. So the ranks of a node sum their partial results here, on connections of their
own. Every rank must get the same bits: their decisions would otherwise differ, and deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.network import Network
from gossamer.gossip.notices import NoticeBoard
from gossamer.topology.arrays import FloatArray


@final
class Within:
    """One rank's view of the ranks that hold its worker's replica; by default this rank alone.

    Args:
        process_group: those ranks; nothing is sent on it.
        timeout: how long they wait for each other.
    """

    def __init__(
        self, process_group: ProcessGroup | None = None, timeout: timedelta = timedelta(0)
    ) -> None:
        self.size = 1 if process_group is None else process_group.size()
        self.place = 0 if process_group is None else process_group.rank()
        """The index of this rank among them."""
        self._groups = [process_group] if process_group is not None and self.size > 1 else []
        self.boards = [NoticeBoard(group, timeout) for group in self._groups]
        """The notice board of these ranks, for failures: one, or none."""
        self._device = torch.device("cpu")
        self._network: Network | None = None

    def open(self, device: torch.device) -> None:
        """Connect these ranks. Blocks, so all must open connections in the same order."""
        self._device = device
        for group, board in zip(self._groups, self.boards, strict=True):
            detector = FailureDetector(board)
            detector.watch()
            with detector.leaving_on_error():
                self._network = Network(group, detector, device)

    def at(self, step: int) -> None:
        """Record the current step, for error messages."""
        if self._network is not None:
            self._network.detector.at(step, "")

    def total(self, rows: Tensor, what: str) -> Tensor:
        """Return the sum of a tensor over these ranks, with the same bits on all of them."""
        # Gathered and summed in the order of ranks: an all-reduce does not promise equal bits.
        if self._network is None:
            return rows
        gather = self._network.collectives.begin_gather_rows(
            rows.reshape(-1), f"{what} within the node"
        )
        return gather().sum(0).view_as(rows)

    def mean(self, rows: Tensor, what: str) -> Tensor:
        """Return the mean of a tensor over these ranks."""
        return self.total(rows, what) / self.size if self._network else rows

    def norms(self, norms: FloatArray, what: str) -> FloatArray:
        """Return norms of full replicas from the norms of each rank's part; NaN if one is NaN."""
        if self._network is None:
            return norms
        squares = torch.from_numpy(np.square(norms)).to(self._device)
        return self.total(squares, what).sqrt().numpy(force=True)

    def slice_of(self, bucket: Tensor) -> Tensor:
        """Return this rank's slice of a bucket, which shares its memory."""
        return bucket.chunk(self.size)[self.place]

    def all_gather_(self, buckets: Sequence[Tensor]) -> None:
        """Fill the slices of the other ranks in buckets with theirs."""
        if self._network is not None:
            for wait in [*map(self._network.collectives.begin_all_gather, buckets)]:
                wait()

    def whole_of(self, own: Tensor) -> Tensor:
        """Return the concatenation of all ranks' slices."""
        whole = own.new_empty(self.size * len(own))
        self.slice_of(whole).copy_(own)
        self.all_gather_([whole])
        return whole

    def gather(self, value: int, what: str) -> list[int]:
        """Return the integers of these ranks."""
        if self._network is None:
            return [value]
        return self._network.collectives.begin_gather(value, f"{what} within the node")()

    # - The end

    def leave(self, reason: str, *, ended: bool = False) -> None:
        """Report to these ranks why this one ends."""
        if self._network is not None:
            self._network.detector.leave(reason, ended=ended)

    def close(self) -> None:
        """Leave all groups; nothing may be in flight."""
        if self._network is None or self._network.detector.broken:
            return
        self._network.close()
        self._network.detector.board.discard()
        self._network = None

    def abandon(self, seconds: float) -> None:
        """Prepare for the exit of the process after a failure; see ``Network.abandon``."""
        if self._network is not None:
            self._network.abandon(seconds)
