"""Mixing buckets with neighbours: start a round, finish it; owns everything in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.profiler import record_function

from gossamer.gossip.transport import Exchange, ExchangeError, Transport
from gossamer.topology import Round


@final
class Mixer:
    """x ← W x on the buckets of one rank, in two halves with computation between them.

    Between ``start`` and ``finish`` the buckets are what is being sent and must not change. Buckets
    that do change in the meantime (statistics that a forward pass updates) are sent as a copy; the
    worker then keeps its weight on their current value. The only memory is an inbox per bucket,
    and those copies. After a failure every further call raises it again: what is in the inboxes is
    not to be used.

    Args:
        buckets: what is mixed.
        transport: how it travels.
        changing: buckets that are sent as a copy.
    """

    def __init__(
        self, buckets: Sequence[Tensor], transport: Transport, changing: Sequence[Tensor] = ()
    ) -> None:
        self._transport = transport
        self._targets = [*buckets, *changing]
        self._sources = [*buckets, *(torch.empty_like(bucket) for bucket in changing)]
        self._inboxes = [torch.empty_like(bucket) for bucket in self._targets]
        self._in_flight: list[Exchange] = []
        self._failure: ExchangeError | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a round has been started and not finished."""
        return bool(self._in_flight)

    def start(self, round: Round) -> None:
        """Begin to exchange all buckets; returns at once."""
        assert not self._in_flight, "finish a round before the next one starts"
        self._raise_failure()
        with record_function("Mixer::start"), torch.no_grad():
            for tag, (source, target) in enumerate(zip(self._sources, self._targets, strict=True)):
                if source is not target:
                    source.copy_(target)
                exchange = self._transport.begin(round, source, self._inboxes[tag], tag)
                self._in_flight.append(exchange)

    def wait(self) -> None:
        """Wait until nothing is on the wire; the mixing itself is left to ``finish``."""
        with record_function("Mixer::wait"):
            for exchange in self._in_flight:
                self._wait_for(exchange)

    def finish(self) -> None:
        """Wait for each bucket and mix it, in the order in which they were started."""
        with record_function("Mixer::finish"), torch.no_grad():
            for tag, exchange in enumerate(self._in_flight):
                self._wait_for(exchange)
                self._mix(tag, exchange)
        self._in_flight = []

    def close(self) -> None:
        """Wait for what is in flight, and let go of all memory."""
        try:
            self.wait()
        finally:
            self._in_flight, self._inboxes, self._sources, self._targets = [], [], [], []

    def _mix(self, tag: int, exchange: Exchange) -> None:
        """x_i ← w_ii x_i + Σ_j w_ij x_j, from what the exchange left in the inbox."""
        source, target, inbox = self._sources[tag], self._targets[tag], self._inboxes[tag]
        own = exchange.self_weight
        if not exchange.includes_self:
            if own < 1:
                target.lerp_(inbox, 1 - own)
        elif source is target:
            target.copy_(inbox)
        else:
            target.sub_(source).mul_(own).add_(inbox)

    def _wait_for(self, exchange: Exchange) -> None:
        self._raise_failure()
        try:
            exchange.wait()
        except ExchangeError as error:
            self._failure = error
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
