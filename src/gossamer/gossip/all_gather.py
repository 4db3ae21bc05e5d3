"""All-gather in log2(n) messages per rank, for any number of ranks.

Gloo gathers along a ring: at a thousand ranks a row makes a thousand hops, and each rank sends a
thousand messages. A controller needs all ranks' sketches at every step, so they are gathered as in
Bruck et al. (1997): at distances 1, 2, 4, ... a rank forwards all rows that it has, which doubles
the rows of its receiver. The number of bytes is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, final

from torch import Tensor

from gossamer.gossip.collector import Collector
from gossamer.gossip.connections import Connections
from gossamer.topology.graphs import powers_of_two_below

_TAG = 1 << 24
"""The lowest tag; above the tags of all buckets, which may use the same connections."""


class _Hop(NamedTuple):
    """The peers that a rank receives from and sends to at one distance."""

    distance: int
    source: int
    target: int


@final
class AllGather:
    """Gathers rows from all ranks over Gloo, on a thread of its own.

    Args:
        connections: connects ranks at distances that are powers of two. That blocks, so all ranks
            must construct this in the same order among the connections that they open.
    """

    def __init__(self, connections: Connections) -> None:
        rank, size = connections.rank, connections.size
        self._connections = connections
        self._hops = [
            _Hop(distance, source=(rank + distance) % size, target=(rank - distance) % size)
            for distance in powers_of_two_below(size).tolist()
        ]
        self._collector = Collector()
        lanes = [lane for hop in self._hops for lane in ((hop.source, rank), (rank, hop.target))]
        with connections.detector.blocked():
            connections.open_lanes(frozenset(lanes))

    def begin(self, row: Tensor, what: str) -> Callable[[], Tensor]:
        """Start to gather a vector from every rank; return the function that waits for them.

        Args:
            row: this rank's vector, [m]; of the same size and dtype on all ranks.
            what: what the vectors are, for error messages.
        """
        rows = row.new_empty(self._connections.size, len(row))
        rows[0] = row
        # Tasks run in the order of submission, which is the same on all ranks, so messages of two
        # gathers cannot be confused. If ranks disagree on the gather, the tag by dtype and size
        # makes the wait time out: Gloo aborts a process that receives more bytes than it posted.
        tag = (2 * _TAG if row.is_floating_point() else _TAG) + row.nbytes
        done = self._collector.submit(lambda: self._exchange(rows, tag, what))

        def collect() -> Tensor:
            done.result()
            return rows.roll(self._connections.rank, 0)  # rows[0] is this rank's own

        return collect

    def _exchange(self, rows: Tensor, tag: int, what: str) -> None:
        begin, lane = self._connections.begin, self._connections.lane
        rank, everyone = self._connections.rank, self._connections.everyone
        # Errors name all others as possible causes: a late rank delays every hop after its own.
        others = self._connections.others_in(everyone)
        for distance, source, target in self._hops:
            missing = rows[distance : 2 * distance]
            held = rows[: len(missing)]
            received = begin(partial(lane(source, rank).recv, [missing], 0, tag), what, others)
            sent = begin(partial(lane(rank, target).send, [held], 1, tag), what, others)
            received()
            sent()

    def wait_idle(self, seconds: float) -> bool:
        """Wait until the thread is idle; return whether it is before the timeout."""
        return self._collector.wait_idle(seconds)

    def close(self) -> None:
        """End the thread; nothing may be in flight."""
        self._collector.end()
