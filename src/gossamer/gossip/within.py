"""The ranks that hold one worker's replica together, within a node; gossip connects nodes.

Everything that is said of a worker (how far it is from the others, whether its parameters are
finite) is of all of its parameters. So what one rank measures of what it holds is brought together
here, on connections of their own: the same bits on every rank, whose decisions then agree.
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
    """One rank's view of the ranks that its worker's replica is on; by default it is alone.

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
        """Where they tell each other what goes wrong: one, or none."""
        self._device = torch.device("cpu")
        self._network: Network | None = None

    def open(self, device: torch.device) -> None:
        """Connect these ranks, which all do this at the same place among what they open."""
        self._device = device
        for group, board in zip(self._groups, self.boards, strict=True):
            detector = FailureDetector(board)
            detector.watch()
            with detector.leaving_on_error():
                self._network = Network(group, detector, device)

    def at(self, step: int) -> None:
        """Note the step, for whoever asks why it failed."""
        if self._network is not None:
            self._network.detector.at(step, "")

    def total(self, rows: Tensor, what: str) -> Tensor:
        """Return the sum of a tensor over these ranks, in one order on all of them."""
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
        """Return norms of whole replicas from those of what each rank holds; NaN where one is."""
        if self._network is None:
            return norms
        squares = torch.from_numpy(np.square(norms)).to(self._device)
        return self.total(squares, what).sqrt().numpy(force=True)

    def slice_of(self, bucket: Tensor) -> Tensor:
        """Return this rank's slice of a bucket, which shares its memory."""
        return bucket.chunk(self.size)[self.place]

    def all_gather_(self, buckets: Sequence[Tensor]) -> None:
        """Replace the slices of the other ranks in buckets by what these have there."""
        if self._network is not None:
            for wait in [*map(self._network.collectives.begin_all_gather, buckets)]:
                wait()

    def whole_of(self, own: Tensor) -> Tensor:
        """Return what the slices of all ranks are together."""
        whole = own.new_empty(self.size * len(own))
        self.slice_of(whole).copy_(own)
        self.all_gather_([whole])
        return whole

    def gather(self, value: int, what: str) -> list[int]:
        """Return every one of these ranks' numbers."""
        if self._network is None:
            return [value]
        return self._network.collectives.begin_gather(value, f"{what} within the node")()

    # - The end

    def leave(self, reason: str, *, ended: bool = False) -> None:
        """Tell these ranks why this one ends."""
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
        """Let the process end though these ranks may have failed it; see ``Network.abandon``."""
        if self._network is not None:
            self._network.abandon(seconds)
