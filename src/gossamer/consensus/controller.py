"""Controllers: how workers mix at each step, decided from observations.

    decide: (observation, state) → (decision, state)

A decision is a tuple of Rounds to mix with, in this order: q of them under atc, which may repeat;
one under awc, whose exchange overlaps with the gradient. A controller is pure, and every rank feeds
it bit-identical observations, so all ranks decide the same without sending decisions. One that read
a clock or an unseeded generator would make ranks wait for messages that are never sent, so engines
compare digests of decisions. As sketches are linear, W times the sketches give the distance after
any round before anything is sent.

A controller owns its state: it creates, updates, saves and loads it. To engines it is opaque.
"""

# n: workers, m: floats in a sketch

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, final, runtime_checkable

import numpy as np

from gossamer.consensus.distance import sketch_distance
from gossamer.consensus.memories import (
    CriticalDistance,
    GradientNorm,
    Memory,
    PhaseMemory,
    PlainDistance,
)
from gossamer.consensus.observation import Needs, Observation
from gossamer.consensus.targets import EXACT, PLAIN, Phases, Target
from gossamer.topology import Round, Schedule, complete
from gossamer.topology.arrays import FloatArray
from gossamer.topology.round import digest_of

State = TypeVar("State")
"""A controller's state, of any type."""


@final
@dataclass(frozen=True)
class Decision:
    """The rounds of one step, and what they are expected to achieve."""

    rounds: tuple[Round, ...]
    """Mix with these, in this order."""

    distance: float
    """The estimate of Ξ after them; NaN where nothing was observed."""

    target: float
    """The target that it should stay under."""

    @property
    def digest(self) -> str:
        """A short hash of the rounds, for ranks to compare."""
        return digest_of(self.rounds)


@runtime_checkable
class Controller(Protocol[State]):
    """Decides how workers mix at each step; made by a policy's ``bind``."""

    def start(self, step: int) -> State:
        """Return the initial state, before the first step that it decides."""
        ...

    def needs(self, step: int, state: State) -> Needs:
        """Return what must be observed for a step; the learning rate always is."""
        ...

    def decide(self, seen: Observation, state: State) -> tuple[Decision, State]:
        """Return how to mix at a step, and the next state; must not modify the one given.

        Engines decide again from the old state when a checkpoint is loaded.
        """
        ...

    def save(self, state: State) -> dict[str, Any]:
        """Return a state as data: numbers, strings, None, tensors, lists and dicts of them.

        All ranks compare it at every step, so it should be small.
        """
        ...

    def load(self, saved: dict[str, Any]) -> State:
        """Return the state that ``save`` described; tuples may have become lists."""
        ...


@runtime_checkable
class Policy(Protocol):
    """How to keep workers within a target distance.

    Its ``repr`` identifies it, in the handshake and in saved states, so it must include all
    settings, as a dataclass's does. One that mixes when the schedule does, and only then, may have
    an attribute ``follows_schedule = True``: it is then allowed together with ``every``.
    """

    def bind(self, schedule: Schedule, order: str) -> Controller[Any]:
        """Return the controller for a schedule and an order; raise where it cannot act on them."""
        ...


Choose = Callable[[Observation, float, int], tuple[Decision, int]]
"""From an observation, a target and what was held, to a decision and what to hold for steps at
which nothing is observed. The target is ``PLAIN`` or a distance; ``EXACT`` asks for no choice."""


@final
@dataclass(frozen=True)
class TargetState:
    """The state of a controller with a target."""

    memory: PhaseMemory
    held: int = 0
    """The last choice, which steps without an observation repeat."""


@final
class TargetController:
    """Keeps the distance under a target by choosing rounds.

    Args:
        target: how far apart workers may be.
        choose: the policy's choice of rounds.
        schedule: what plain gossip mixes with.
        interval: steps between observations.
    """

    def __init__(
        self, target: Target, choose: Choose, schedule: Schedule, interval: int = 1
    ) -> None:
        self._target = Phases.of(target)
        self._choose = choose
        self._schedule = schedule
        self._interval = interval
        self.start(0)  # raises now, not in training, if the target cannot work on this schedule

    @cached_property
    def _exact(self) -> Round:
        return complete(self._schedule.num_workers)

    def start(self, step: int) -> TargetState:
        """Return the initial state, before the first step that it decides."""
        return TargetState(self._target.remember(self._schedule, step))

    def needs(self, step: int, state: TargetState) -> Needs:
        """Return what is to be observed for a step; nothing but the learning rate in between."""
        return self._target.needs(state.memory) if step % self._interval == 0 else Needs()

    def decide(self, seen: Observation, state: TargetState) -> tuple[Decision, TargetState]:
        """Return how to mix at this step, and the next state."""
        if seen.sketches is not None and not np.isfinite(seen.sketches).all():
            # Overflowed. Every comparison of a NaN distance with a target is false, so that some
            # policies would take it for small and others for large.
            seen = replace(seen, sketches=None)
        # Before the target is read: its phase may begin at this very step.
        memory = state.memory.observed(seen)
        target = self._target.value(seen, memory)
        if target == EXACT:
            return decided((self._exact,), seen, 0.0), TargetState(memory, state.held)
        decision, held = self._choose(seen, target, state.held)
        if target == PLAIN:
            # Only distances of plain gossip calibrate: those under control are at their target, and
            # the next target would be a fraction of that.
            memory = memory.mixed_plainly(seen, decision.distance)
        return decision, TargetState(memory, held)

    def save(self, state: TargetState) -> dict[str, Any]:
        """Return the state as data."""
        return {"memory": state.memory.save(), "held": state.held}

    def load(self, saved: dict[str, Any]) -> TargetState:
        """Return the state that ``save`` described."""
        memory = self.start(0).memory  # has what is not saved, such as the steps of phases
        saved = saved if "memory" in saved else _upgraded(saved, memory)
        return TargetState(memory.load(saved["memory"]), saved["held"])


def mixed_distance(rounds: Sequence[Round], sketches_nm: FloatArray) -> float:
    """Return the estimate of Ξ after mixing with these rounds, first to last."""
    for round in rounds:
        sketches_nm = round.mixed(sketches_nm)
    return sketch_distance(sketches_nm)


def decided(rounds: tuple[Round, ...], seen: Observation, target: float) -> Decision:
    """Return the decision for these rounds, with the distance after them where sketches tell it."""
    distance = np.nan if seen.sketches is None else mixed_distance(rounds, seen.sketches)
    return Decision(rounds, distance, target)


def _upgraded(saved: dict[str, Any], start: PhaseMemory) -> dict[str, Any]:
    """Return a state as it is saved now, from one that targets had in common, before 0.1.0."""
    known: dict[type[Memory], dict[str, Any]] = {
        PlainDistance: {
            "calibrates_from": saved["calibrates_from"],
            "calibrates_until": saved["calibrates_until"],
            "total": saved["plain_total"],
            "count": saved["plain_count"],
        },
        GradientNorm: {"square": saved["gradient2"]},
        CriticalDistance: {"estimate": saved["critical"]},
    }
    members = [known.get(type(member), {}) for member in start.members]
    memory = {"phase": saved["phase"], "lr_before": saved["lr_before"], "members": members}
    return {"memory": memory, "held": saved["held"]}
