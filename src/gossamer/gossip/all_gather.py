"""Every rank's row on every rank, in as many messages as the logarithm of their number.

Gloo gathers along a ring: at a thousand ranks a row passes through a thousand of them, and each
handles a thousand messages. A controller asks for all ranks' sketches at every step, so here they
travel as in Bruck et al. (1997): at distance 1, 2, 4, ... a rank hands on all that it has, and has
twice as much after it. The bytes are the same, and any number of ranks will do.
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
"""Of the first message; above all buckets', whose connections these may share."""


class _Hop(NamedTuple):
    """Whom a rank receives from and sends to at one distance."""

    distance: int
    source: int
    target: int


@final
class AllGather:
    """Gathers rows from all ranks over Gloo, on a thread of its own.

    Args:
        connections: how to reach the ranks at distances that are powers of two. They are connected
            here, so all ranks do this at the same place among what they open.
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
        """Begin to collect a vector from every rank; return the function that waits for them all.

        Args:
            row: this rank's, [m]; of one size and dtype on all ranks.
            what: what is waited for, for whoever asks why it failed.
        """
        rows = row.new_empty(self._connections.size, len(row))
        rows[0] = row
        # Tasks run in the order in which they were begun, which is the same on all ranks, so a
        # message cannot be taken for another gather's. Those of another kind or size have other
        # tags: Gloo ends a process that gets more bytes than it has room for.
        tag = (2 * _TAG if row.is_floating_point() else _TAG) + row.nbytes
        done = self._collector.submit(lambda: self._exchange(rows, tag, what))

        def collect() -> Tensor:
            done.result()
            return rows.roll(self._connections.rank, 0)  # they begin with this rank's own

        return collect

    def _exchange(self, rows: Tensor, tag: int, what: str) -> None:
        begin, lane = self._connections.begin, self._connections.lane
        rank, everyone = self._connections.rank, self._connections.everyone
        others = self._connections.others_in(everyone)  # whoever is late, all wait in the end
        for distance, source, target in self._hops:
            missing = rows[distance : 2 * distance]
            held = rows[: len(missing)]
            received = begin(partial(lane(source, rank).recv, [missing], 0, tag), what, others)
            sent = begin(partial(lane(rank, target).send, [held], 1, tag), what, others)
            received()
            sent()

    def wait_idle(self, seconds: float) -> bool:
        """Return whether the thread waits for nothing, within a time."""
        return self._collector.wait_idle(seconds)

    def close(self) -> None:
        """End the thread; nothing may be in flight."""
        self._collector.end()
