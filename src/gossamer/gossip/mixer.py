"""Mixing of buckets with neighbours: start a round, finish it. Owns all exchanges in flight.

States of a mixer:

            start                drain
    idle ----------> in flight ----------> drained    nothing on the wire, not yet mixed
     ^                   |                    |
     +-------------------+--------------------+       finish mixes, discard does not
    any state ------------> broken                    an exchange failed; every call raises it
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.profiler import record_function

from gossamer.gossip.exchange import Exchange, InFlight
from gossamer.gossip.left_out import LeftOut
from gossamer.gossip.network import Network
from gossamer.gossip.parcel import CodedExchange, Parcel
from gossamer.topology import Round
from gossamer.wire import UNDECODED, Wire, load_outboxes

_log = logging.getLogger(__name__)


class MixerState(enum.Enum):
    """The state of a mixer between two rounds."""

    IDLE = "idle"
    IN_FLIGHT = "in flight"
    DRAINED = "drained"
    BROKEN = "broken"


@final
class Mixer:
    """x ← W x on the buckets of one rank, started and finished with computation in between.

    If the wire format encodes messages, buckets are mixed by differences with the worker's own
    message (``Parcel``); an all-reduce sends them in full.

    Between ``start`` and ``drain`` or ``finish`` the buckets are in flight and must not change.
    Buckets that do change meanwhile (statistics that a forward pass updates) are sent as a copy,
    and the worker's own weight applies to their current value. Memory is an inbox per bucket, and
    those copies. After a failure the content of inboxes is undefined.

    A worker whose buckets are not finite sends marks and keeps its buckets; receivers keep the
    weight of the mark on their own (``Round.without``).

    Args:
        buckets: the buckets to mix.
        network: the connections to other ranks.
        left_out: detects ranks whose parameters are not finite.
        wire: the format of ``buckets``; ``exact`` and ``changing`` are always sent in full.
        exact: more buckets.
        changing: buckets that are sent as a copy.
        first_tag: the tag of the first bucket; mixers of one rank need disjoint tags, or they would
            receive each other's messages.
        compares_rounds: whether ranks compare the digest of each round, because it is not known to
            be the same on all of them.
    """

    def __init__(
        self,
        buckets: Sequence[Tensor],
        network: Network,
        left_out: LeftOut,
        wire: Wire,
        *,
        exact: Sequence[Tensor] = (),
        changing: Sequence[Tensor] = (),
        first_tag: int = 0,
        compares_rounds: bool = False,
    ) -> None:
        self._state = MixerState.IDLE
        self.size = network.size
        """The number of workers."""
        self._first_tag = first_tag
        # - What is mixed
        self._num_buckets = len(buckets)
        self._targets = [*buckets, *exact, *changing]
        self._sources = [*buckets, *exact, *(torch.empty_like(bucket) for bucket in changing)]
        codecs = {b.dtype: wire.codec(b.dtype, b.device) for b in buckets}
        coded = [(bucket, codecs[bucket.dtype]) for bucket in buckets]
        self._parcels = {tag: Parcel(b, codec) for tag, (b, codec) in enumerate(coded) if codec}
        self._inboxes = [self._inbox_of(tag, b) for tag, b in enumerate(self._targets)]
        # - How it is sent
        self._wire = wire
        self._transport = network.transport
        self._collectives = network.collectives
        self._detector = network.detector
        self._telemetry = network.telemetry
        self._left_out = left_out
        self._compares_rounds = compares_rounds
        # Survivors continue from their own parameters after a failure. If buckets were mixed as
        # they arrive, a failure could leave some mixed and others not.
        self._drains_before_mixing = network.detector.survives
        self._in_flight: dict[int, Exchange | CodedExchange] = {}
        self._logged_undecoded = False
        self._comparison: Callable[[], None] | None = None
        self._started_at = 0.0

    def _inbox_of(self, tag: int, bucket: Tensor) -> Tensor:
        """Return memory for messages of full buckets: a parcel's sum, if it has the same dtype."""
        parcel = self._parcels.get(tag)
        fits = parcel is not None and parcel.total.dtype == bucket.dtype
        return parcel.total if parcel is not None and fits else torch.empty_like(bucket)

    @property
    def state(self) -> MixerState:
        """Its state; broken after the first failure of any exchange or collective of this rank."""
        return MixerState.BROKEN if self._detector.broken else self._state

    def start(
        self,
        round: Round,
        step: int,
        *,
        buckets: Sequence[int] | None = None,
        agrees_on: str = "",
    ) -> None:
        """Start to exchange buckets; does not block.

        Args:
            round: who mixes with whom.
            step: the step that will finish it, for error messages.
            buckets: indices of the buckets to exchange, besides exact and changing ones; by default
                all.
            agrees_on: a digest that must be equal on all ranks, compared while messages travel.
        """
        self._detector.raise_failure()
        assert self.state is MixerState.IDLE, "finish a round before the next one starts"
        self._detector.at(step, round.digest)
        self._started_at = time.perf_counter()
        self._wire.check_round(round, f"at step {step}")  # raises before anything is posted
        digest = agrees_on or (round.digest if self._compares_rounds else "")
        is_local = not round.degree and round.num_workers > 1
        if is_local and not digest:
            return
        with record_function("Mixer::start"), torch.no_grad():
            if digest:
                self._comparison = self._collectives.begin_comparison(digest)
            if not is_local:
                self._begin_exchanges(round, step, buckets)
        self._state = MixerState.IN_FLIGHT

    def _begin_exchanges(self, round: Round, step: int, buckets: Sequence[int] | None) -> None:
        # Copies of changing buckets first: what is checked to be finite must be what is sent.
        for source, target in zip(self._sources, self._targets, strict=True):
            if source is not target:
                source.copy_(target)
        sent = self._left_out.sound_or_marks(self._sources, round, step)
        others = range(self._num_buckets, len(sent))
        tags = [*(range(self._num_buckets) if buckets is None else buckets), *others]
        reduces = bool(round.reduces[self._transport.rank])
        coded = [] if reduces else [tag for tag in tags if tag in self._parcels]
        first, marks = self._first_tag, self._left_out.is_self
        # In the same order on all ranks, coded buckets before others; see transport's
        # Note [No deadlock].
        if coded:
            parcels = [(first + tag, self._parcels[tag]) for tag in coded]
            begun = self._transport.begin_coded(round, parcels, marks=marks)
            self._in_flight.update(zip(coded, begun, strict=True))
        for tag in tags:
            if tag not in self._in_flight:
                self._in_flight[tag] = self._transport.begin(
                    round, sent[tag], self._inboxes[tag], first + tag
                )

    def drain(self) -> None:
        """Wait for all messages in flight, without mixing, which is left to ``finish``."""
        self._detector.raise_failure()
        if self.state is MixerState.IN_FLIGHT:
            with record_function("Mixer::drain"):
                self._compare()
                for exchange in self._in_flight.values():
                    self._wait_for(exchange)
                self._landed(MixerState.DRAINED)

    def finish(self) -> None:
        """Wait for each bucket and mix it, in the order in which they were started."""
        if self._drains_before_mixing:
            self.drain()
        self._detector.raise_failure()
        assert self.state in (MixerState.IN_FLIGHT, MixerState.DRAINED), (
            f"nothing to finish: {self.state}"
        )
        with record_function("Mixer::finish"), torch.no_grad():
            self._compare()
            for tag, exchange in self._in_flight.items():
                if self.state is MixerState.IN_FLIGHT:
                    self._wait_for(exchange)
                if isinstance(exchange, CodedExchange):
                    self._mix_coded(exchange)
                else:
                    self._mix(tag, exchange)
            self._landed(MixerState.IDLE)
        exchanges = self._in_flight.values()
        if exchanges:  # none in a local step that only compared rounds
            self._left_out.count(
                (exchange.left_out for exchange in exchanges),
                mean_moves=any(e.moves_mean for e in exchanges if isinstance(e, CodedExchange)),
            )
        self._in_flight = {}

    def discard(self) -> None:
        """Wait for all messages in flight, and discard them."""
        self.drain()
        # Parameters may have been replaced: their norm must not be compared with that of the last
        # round, as if a step had made them grow.
        self._left_out.forget_norms()
        self._state, self._in_flight = MixerState.IDLE, {}

    def drop(self) -> None:
        """Release all memory and exchanges in flight, without waiting for them."""
        for exchange in self._in_flight.values():
            exchange.drop()
        self._in_flight, self._inboxes, self._sources, self._targets = {}, [], [], []
        self._parcels = {}
        self._comparison = None

    def close(self) -> None:
        """Wait for exchanges in flight, and release all memory."""
        try:
            if self.state is MixerState.IN_FLIGHT:
                self.drain()
        finally:
            self.drop()

    # - State

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the wire format's state of each bucket that has one."""
        states = [parcel.outbox.state_dict() for parcel in self._parcels.values()]
        return [state for state in states if state]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Resume from a state; reset where it is of other buckets or members."""
        parcels = self._parcels.values()
        load_outboxes([each.outbox for each in parcels], states, [each.bucket for each in parcels])

    def _mix(self, tag: int, exchange: Exchange) -> None:
        """x_i ← w_ii x_i + Σ_j w_ij x_j, with the sum over neighbours in the inbox."""
        source, target, inbox = self._sources[tag], self._targets[tag], self._inboxes[tag]
        own = exchange.self_weight
        if self._left_out.is_self or (own == 1 and exchange.sums_to_one):
            return
        if not exchange.sums_to_one:
            target.mul_(own)
            if exchange.received_weight:  # otherwise the inbox may hold a mark, whose NaN spreads
                target.add_(inbox, alpha=exchange.received_weight)
        elif not exchange.includes_self:
            target.lerp_(inbox, 1 - own)
        elif source is target:
            target.copy_(inbox)
        else:  # the mean holds the copy that was sent: add this rank's share of the change since
            target.sub_(source).mul_(own).add_(inbox)

    def _mix_coded(self, exchange: CodedExchange) -> None:
        exchange.mix()
        self._telemetry.undecoded.update(exchange.undecoded)
        if exchange.undecoded and not self._logged_undecoded:
            self._logged_undecoded = True
            _log.warning(UNDECODED, "rank", self._transport.rank, "rank", exchange.undecoded[0])

    def _compare(self) -> None:
        """Wait for the comparison of rounds across ranks, if one was started."""
        if self._comparison is not None:
            began = time.perf_counter()
            self._comparison()
            self._comparison = None
            self._telemetry.exposed_s += time.perf_counter() - began

    def _wait_for(self, exchange: InFlight) -> None:
        began = time.perf_counter()
        self._transport.wait_for(exchange)
        self._telemetry.exposed_s += time.perf_counter() - began

    def _landed(self, state: MixerState) -> None:
        if self.state is MixerState.IN_FLIGHT:
            self._telemetry.in_flight_s += time.perf_counter() - self._started_at
        self._state = state
