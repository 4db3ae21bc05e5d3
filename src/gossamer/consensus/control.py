"""Controllers: how workers mix at each step, decided from what they see.

    decide: (observation, state) → (decision, state)

A decision is a tuple of Rounds to mix with, in this order: q of them under atc, which may repeat;
one under awc, whose exchange hides behind the gradient. A controller is pure, and every rank feeds
it the same reduced bits, so all ranks decide the same; engines compare digests of decisions. As
sketches are linear, W times the sketches tell the distance after any round: nothing is tried out on
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol, cast, final, runtime_checkable

import numpy as np

from gossamer.consensus.distance import sketch_distance
from gossamer.consensus.targets import (
    Constant,
    Exact,
    Needs,
    Observation,
    Phases,
    State,
    Target,
    calibrated,
    observed,
)
from gossamer.topology import Round, Schedule, complete
from gossamer.topology.round import FloatArray, digest_of
from gossamer.topology.spectrum import mixing_rate

_SHORTEST_CALIBRATION, _LONGEST_CALIBRATION = 20, 200


@final
@dataclass(frozen=True)
class Decision:
    """How to mix at one step."""

    rounds: tuple[Round, ...]
    """Mix with these, in this order."""

    distance: float
    """The estimate of Ξ after them; NaN where nothing was observed."""

    target: float
    """What it was to stay under."""

    @property
    def digest(self) -> str:
        """A short hash of the rounds, for ranks to compare."""
        return digest_of(self.rounds)


class Choice(NamedTuple):
    """What an action came to."""

    rounds: tuple[Round, ...]
    held: int
    """What to remember for steps at which nothing is observed."""

    distance: float = math.nan
    """The estimate of Ξ after the rounds."""


Choose = Callable[[Observation, float, State], Choice]
"""An action on a schedule: from an observation, a target and the state to rounds. A target of 0 is
a very small one; the exact average that ``Exact`` asks for is no business of an action."""


@final
@dataclass(frozen=True)
class Controller:
    """A control at work on a schedule; made by ``bind``.

    Args:
        target: how far apart workers may be.
        choose: what to do about it.
        schedule: what plain gossip mixes with.
        interval: steps between observations.
    """

    target: Target
    choose: Choose
    schedule: Schedule
    interval: int = 1
    _phases: Phases = field(init=False, repr=False)
    _calibration: int = field(init=False)

    def __post_init__(self) -> None:
        phases = self.target if isinstance(self.target, Phases) else Phases((self.target,))
        calibrates = any(isinstance(target, Constant) for target in phases.targets)
        object.__setattr__(self, "_phases", phases)
        object.__setattr__(self, "_calibration", _calibration(self.schedule) if calibrates else 0)

    @property
    def start(self) -> State:
        """The state before step 0."""
        return State(calibrates_from=self._calibration // 2, calibrates_until=self._calibration)

    @cached_property
    def _exact(self) -> Round:
        return complete(self.schedule.num_workers)

    def needs(self, step: int, state: State) -> Needs:
        """Return what is to be observed for a step; nothing but the learning rate in between."""
        return self.target.needs(state) if step % self.interval == 0 else Needs()

    def decide(self, seen: Observation, state: State) -> tuple[Decision, State]:
        """Return how to mix at this step, and what to remember."""
        if seen.sketches is not None and not np.isfinite(seen.sketches).all():
            seen = replace(seen, sketches=None)  # they overflowed, and tell nothing
        state = observed(state, seen, self._phases.at, self._calibration)
        target = self.target.value(seen, state)
        if isinstance(self._phases.current(state), Exact):
            # Only this one is beyond the limits of an action; a target that came out as 0 is not.
            choice = measured((self._exact,), state.held, seen)
        else:
            choice = self.choose(seen, target, state)
        if math.isinf(target):
            state = calibrated(state, seen, choice.distance)
        state = replace(state, held=choice.held)
        return Decision(choice.rounds, choice.distance, target), state


@runtime_checkable
class Control(Protocol):
    """A target, and a way to act on it."""

    def bind(self, schedule: Schedule, order: str) -> Controller:
        """Return the controller for a schedule and an order; refuse what cannot act there."""
        ...


def mix(round: Round, sketches_nm: FloatArray) -> FloatArray:
    """Return the sketches after a round."""
    return cast(FloatArray, round.matrix() @ sketches_nm)


def mixed_distance(rounds: Sequence[Round], sketches_nm: FloatArray) -> float:
    """Return the estimate of Ξ after mixing with these rounds, first to last."""
    for round in rounds:
        sketches_nm = mix(round, sketches_nm)
    return sketch_distance(sketches_nm)


def measured(rounds: tuple[Round, ...], held: int, seen: Observation) -> Choice:
    """Return these rounds as a choice, with the distance after them where sketches tell it."""
    if seen.sketches is None:
        return Choice(rounds, held)
    return Choice(rounds, held, mixed_distance(rounds, seen.sketches))


def _calibration(schedule: Schedule) -> int:
    """Return how many plain steps a calibration takes: 4/p, so that the second half is stationary.

    A squared distance forgets its start at the rate p. Graphs so slow that this would be long are
    measured short of their full distance: the target is then tighter than asked for.
    """
    rate = mixing_rate(schedule)  # refuses a schedule that does not conserve the mean
    steps = 4 / rate if rate > 0 else math.inf
    return math.ceil(min(max(steps, _SHORTEST_CALIBRATION), _LONGEST_CALIBRATION))
