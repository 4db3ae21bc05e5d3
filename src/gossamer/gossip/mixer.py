"""Mixing buckets with neighbours: start a round, finish it; owns everything in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch.profiler import record_function

from gossamer.gossip.buckets import Bucket
from gossamer.gossip.transport import Exchange, Transport
from gossamer.topology import Round


@final
class Mixer:
    """x ← W x on the buckets of one rank, in two halves with computation between them.

    Between ``start`` and ``finish`` the buckets are what is being sent and must not change; a
    bucket that does change in the meantime (statistics that a forward pass updates) is sent as a
    copy. The only memory is one inbox per bucket, and that copy.

    Args:
        buckets: what is mixed.
        transport: how it travels.
        changing: buckets among them that are sent as a copy.
    """

    def __init__(
        self, buckets: Sequence[Bucket], transport: Transport, changing: Sequence[Bucket] = ()
    ) -> None:
        self._transport = transport
        self._targets = [bucket.flat for bucket in (*buckets, *changing)]
        copies = [torch.empty_like(bucket.flat) for bucket in changing]
        self._sources = [*(bucket.flat for bucket in buckets), *copies]
        self._inboxes = [torch.empty_like(flat) for flat in self._targets]
        self._in_flight: list[Exchange] = []

    @property
    def in_flight(self) -> bool:
        """Whether a round has been started and not finished."""
        return bool(self._in_flight)

    def start(self, round: Round) -> None:
        """Begin to exchange all buckets; returns at once."""
        assert not self._in_flight, "finish a round before the next one starts"
        with record_function("Mixer::start"):
            for tag, (source, target) in enumerate(zip(self._sources, self._targets, strict=True)):
                if source is not target:
                    source.copy_(target)
                exchange = self._transport.begin(round, source, self._inboxes[tag], tag)
                self._in_flight.append(exchange)

    def wait(self) -> None:
        """Wait until nothing is on the wire; the mixing itself is left to ``finish``."""
        with record_function("Mixer::wait"):
            for exchange in self._in_flight:
                exchange.wait()

    def finish(self) -> None:
        """Wait for each bucket and mix it: x ← keep·x + (1 − keep)·(mean of the neighbours)."""
        in_flight, self._in_flight = self._in_flight, []
        with record_function("Mixer::finish"), torch.no_grad():
            for target, inbox, exchange in zip(
                self._targets, self._inboxes, in_flight, strict=True
            ):
                exchange.wait()
                if exchange.keep == 0:
                    target.copy_(inbox)
                elif exchange.keep < 1:
                    target.lerp_(inbox, 1 - exchange.keep)
