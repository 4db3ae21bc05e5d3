"""All of a gossip that depends on its members, and the maker that rebuilds it for other members.

When members change, the ``Epoch`` is replaced: nothing that must outlive it (parameters, optimizer
state, counters) may be kept only here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeAlias, final

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from gossamer.algorithms import PARAMETERS, Algorithm, name_of_numbers
from gossamer.consensus import (
    NormSteps,
    Policy,
    RoundSource,
    Target,
    chooses_rounds,
    make_round_source,
)
from gossamer.errors import UserError
from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.left_out import LeftOut
from gossamer.gossip.mixer import Mixer
from gossamer.gossip.network import Network, rounds_to_connect
from gossamer.gossip.rank_context import RankContext
from gossamer.gossip.rank_meter import RankMeter
from gossamer.gossip.replica import Replica
from gossamer.gossip.telemetry import Telemetry
from gossamer.gossip.within import Within
from gossamer.topology import Round, Schedule, as_schedule
from gossamer.wire import Packing, Wire

_log = logging.getLogger(__name__)

Topology: TypeAlias = str | Round | Schedule | Callable[[int], str | Round | Schedule]
"""What a user chooses; a function returns it for any number of workers."""

_FALLBACKS = ("base_graph(k=1)", "ring", "complete", "star")
"""For numbers of workers without the chosen topology; the first that the algorithm accepts."""

_OPENING_S, _OPENING_PER_WORKER_S = 3.0, 0.05
"""How long members of a new epoch may take to connect: less than the timeout, as all have just
answered."""


@final
@dataclass(frozen=True)
class Rules:
    """The arguments that decide the rounds of an epoch, for any number of members.

    Args:
        topology: the user's choice.
        algorithm: what a step does with rounds.
        every: steps from one exchange to the next.
        gossip_steps: how often a step mixes.
        control: how far apart workers may be.
        norms_every: steps from one measurement of norms to the next.
        fragments: in how many parts the parameters are exchanged.
        wire: the wire format.
    """

    topology: Topology
    algorithm: Algorithm
    every: int
    gossip_steps: int
    control: str | Policy | Target
    norms_every: int
    fragments: int
    wire: Wire

    def schedule(self, num_workers: int) -> Schedule:
        """Return the schedule on a number of workers."""
        return self._adapted(num_workers, self.every, self.fragments)

    def exchanged(self, num_workers: int) -> Schedule:
        """Return that schedule without local steps and fragments."""
        return self._adapted(num_workers, 1, 1)

    def or_fallback(self, num_workers: int) -> Rules:
        """Return these rules if they work on a number of workers, else those with a fallback."""
        try:
            self.check(num_workers)
            return self
        except UserError as error:
            for name in _FALLBACKS:
                rules = replace(self, topology=name)
                try:
                    rules.check(num_workers)
                except UserError:
                    continue
                _log.warning("mixing with %s from now on: %s", name, error)
                return rules
            raise

    def check(self, num_workers: int) -> None:
        """Raise if the topology does not exist on a number of workers, or cannot be run there."""
        self.make_source(self.schedule(num_workers))
        chosen = chooses_rounds(self.control)
        self.wire.check(self.algorithm, self.exchanged(num_workers), rounds_are_chosen=chosen)

    def _adapted(self, num_workers: int, every: int, fragments: int) -> Schedule:
        chosen = self.topology(num_workers) if callable(self.topology) else self.topology
        return self.algorithm.adapt(as_schedule(chosen, num_workers), every, fragments)

    def compares_rounds(self, schedule: Schedule) -> bool:
        """Return whether ranks compare every round, as a custom schedule without a period needs."""
        return not isinstance(self.topology, str) and schedule.period is None

    def norm_steps(self, schedule: Schedule) -> NormSteps:
        """Return the steps at which norms are measured."""
        return NormSteps(schedule, self.algorithm.overlaps, self.norms_every)

    def make_source(self, schedule: Schedule) -> Callable[[RankMeter], RoundSource]:
        """Return a function that makes the round source from a meter."""
        return make_round_source(
            self.control,
            schedule,
            self.algorithm,
            self.gossip_steps,
            self.every,
            self.fragments,
        )


@final
@dataclass(frozen=True)
class Epoch:
    """All of a gossip that depends on its members."""

    members: tuple[int, ...]
    network: Network
    schedule: Schedule
    source: RoundSource
    meter: RankMeter
    context: RankContext
    norm_steps: NormSteps
    first_step: int = 0
    """The first step that all members mix in. A member that is behind takes local steps until then,
    without collectives."""

    def drop(self) -> None:
        """Close all connections, whatever is in flight; peers that wait for it fail at once."""
        self.context.drop()
        self.network.drop()


@final
class EpochMaker:
    """Builds the epochs of one worker.

    Args:
        rules: decide their rounds.
        trained: the parameters.
        names: their names.
        optimizers: update them.
        packing: which buckets each step exchanges.
        nonfinite_rounds: after how many rounds in a row that it is left out of a worker raises.
        within: connects it to the ranks that hold the same replica.
    """

    def __init__(
        self,
        rules: Rules,
        trained: Sequence[Tensor],
        names: Sequence[str],
        optimizers: Sequence[Optimizer],
        packing: Packing,
        nonfinite_rounds: int,
        within: Within,
    ) -> None:
        self.rules = rules
        self._trained = trained
        self._names = names
        self._packing = packing
        self._optimizers = optimizers
        self._nonfinite_rounds = nonfinite_rounds
        self._within = within

    def connect(
        self,
        group: ProcessGroup,
        detector: FailureDetector,
        rules: Rules,
        telemetry: Telemetry | None = None,
    ) -> Network:
        """Connect to the members of a new epoch that follows another one."""
        opening = timedelta(seconds=_OPENING_S + _OPENING_PER_WORKER_S * group.size())
        return Network(
            group,
            detector,
            self._trained[0].device,
            rounds=rounds_to_connect(rules.exchanged(group.size())),
            telemetry=telemetry,
            opening=min(opening, detector.timeout),
        )

    def make(
        self,
        network: Network,
        replica: Replica,
        schedule: Schedule,
        members: tuple[int, ...],
        first_step: int = 0,
    ) -> Epoch:
        """Build an epoch on an open network."""
        mixers: dict[str, Mixer] = {}
        num_tags = 0
        for state, buckets in replica.exchanged.items():
            exact = replica.exact if state == PARAMETERS else ()
            changing = replica.changing if state == PARAMETERS else ()
            sent = [*buckets, *exact, *changing]
            left_out = LeftOut(
                name_of_numbers(state),
                sent,
                network.rank,
                self._nonfinite_rounds,
                network.detector,
                network.telemetry,
                self._within,
            )
            mixers[state] = Mixer(
                buckets,
                network,
                left_out,
                self.rules.wire,
                exact=exact,
                changing=changing,
                first_tag=num_tags,
                compares_rounds=self.rules.compares_rounds(schedule),
            )
            num_tags += len(sent)
        meter = RankMeter(
            self._trained,
            self._optimizers,
            network.collectives,
            replica.weight,
            self._within if replica.is_sharded else None,
        )
        source = self.rules.make_source(schedule)(meter)
        context = RankContext(
            self._trained,
            self._names,
            self.rules.algorithm,
            self._optimizers,
            replica,
            mixers,
            source,
            self._packing,
        )
        if first_step:
            context.first_mixed = first_step + self.rules.algorithm.overlaps
        norm_steps = self.rules.norm_steps(schedule)
        return Epoch(
            members, network, schedule, source, meter, context, norm_steps, first_step=first_step
        )
