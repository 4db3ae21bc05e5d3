"""What targets remember between steps.

Memories are immutable: each update returns a new one. So a decision can be recomputed from the same
memory, as when a checkpoint is loaded, and ranks with the same observations have equal memories.
Targets that begin with equal memories share one: a second ``constant`` reuses the calibration.
"""

# n: workers, m: floats in a sketch

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self, final

import numpy as np

from gossamer.consensus.critical import CriticalState, Smoothed
from gossamer.consensus.observation import Observation
from gossamer.consensus.state_data import from_data, to_data
from gossamer.topology import Schedule
from gossamer.topology.arrays import FloatArray
from gossamer.topology.spectrum import mixing_rate

_SHORTEST_CALIBRATION, _LONGEST_CALIBRATION = 20, 200


@dataclass(frozen=True)
class Memory:
    """What a target remembers: a frozen dataclass. This base class is empty.

    By default fields are saved as they are: numbers, strings, tuples of them, and dataclasses of
    such fields that are not None at the start. For other fields override ``save`` and ``load``.
    """

    def entered(self, step: int) -> Self:
        """Return the memory after a new phase of training has begun at a step."""
        return self

    def observed(self, seen: Observation) -> Self:
        """Return the memory after an observation, before the decision that is based on it."""
        return self

    def mixed_plainly(self, seen: Observation, distance: float) -> Self:
        """Return the memory after a decision for plain gossip.

        Args:
            seen: what was observed.
            distance: Ξ after this step's one round of the schedule; NaN where it is not known.
        """
        return self

    def save(self) -> dict[str, Any]:
        """Return the memory as data that checkpoints and JSON can hold."""
        return to_data(self)

    def load(self, saved: dict[str, Any]) -> Self:
        """Return the memory that ``save`` returned as data; self is the initial memory."""
        return from_data(self, saved)


@final
@dataclass(frozen=True, kw_only=True)
class PlainDistance(Memory):
    """Ξ/η of plain gossip: its mean square over the second half of a calibration."""

    steps: int = 0
    """How many a calibration takes."""

    calibrates_from: int = 0
    """The step from which distances count."""

    calibrates_until: int = 0
    """The step at which calibration ends."""

    total: float = 0.0
    """Sum of (Ξ/η)² so far."""

    count: int = 0

    @staticmethod
    def on(schedule: Schedule, step: int) -> PlainDistance:
        """Return the memory of a calibration on a schedule that begins at a step."""
        return PlainDistance(steps=_calibration(schedule)).entered(step)

    def at(self, step: int) -> float | None:
        """Return Ξ/η, or None while it is not known."""
        if step < self.calibrates_until or self.count == 0:
            return None
        return math.sqrt(self.total / self.count)

    def entered(self, step: int) -> PlainDistance:
        """An unfinished calibration restarts; a finished one is kept."""
        if self.at(step) is not None:
            return self
        return PlainDistance(
            steps=self.steps,
            calibrates_from=step + self.steps // 2,
            calibrates_until=step + self.steps,
        )

    def mixed_plainly(self, seen: Observation, distance: float) -> PlainDistance:
        """One more distance, where this step calibrates."""
        calibrates = seen.step >= self.calibrates_from and self.at(seen.step) is None
        # At a rate of 0, as in the first step of a warm-up, Ξ/η is not defined.
        if not calibrates or math.isnan(distance) or seen.lr == 0:
            return self
        total = self.total + (distance / seen.lr) ** 2
        return replace(self, total=total, count=self.count + 1)


@final
@dataclass(frozen=True)
class GradientNorm(Memory):
    """φ²: the moving average of the mean squared gradient norm of the workers."""

    square: Smoothed = field(default_factory=Smoothed)

    def observed(self, seen: Observation) -> GradientNorm:
        """One more value, where there are gradients and none overflowed."""
        gradients_nm, _ = _present(seen)
        if gradients_nm is None:
            return self
        square = float(np.sum(gradients_nm**2)) / len(gradients_nm)
        return GradientNorm(self.square.add(square))


@final
@dataclass(frozen=True)
class CriticalDistance(Memory):
    """The state of the online estimate of Γ; see ``critical.py``."""

    estimate: CriticalState = field(default_factory=CriticalState)

    def observed(self, seen: Observation) -> CriticalDistance:
        """One more point of the path, with the gradient there."""
        gradients_nm, points_nm = _present(seen)
        if gradients_nm is None or points_nm is None or not np.isfinite(points_nm).all():
            return self
        return CriticalDistance(self.estimate.observe(points_nm, gradients_nm))


@final
@dataclass(frozen=True, kw_only=True)
class PhaseMemory(Memory):
    """Which phase of training it is, and what the targets of all phases remember.

    Every member sees every observation, whichever target is in force.
    """

    members: tuple[Memory, ...]
    """One for all targets that began with equal ones."""

    member_of_phase: tuple[int, ...]
    """The index of each phase's member."""

    at: tuple[int, ...]
    """The steps at which phases begin; empty to follow the learning rate."""

    phase: int = 0
    """Phases begun so far, besides the first."""

    lr_before: float = 0.0
    """The learning rate of the previous observation; the last one above zero."""

    @staticmethod
    def of(memories: Sequence[Memory], at: tuple[int, ...]) -> PhaseMemory:
        """Return the memory of phases whose targets have these; equal ones are shared."""
        # By equality: a second target with an equal memory would calibrate again, in steps without
        # control.
        members: list[Memory] = []
        for memory in memories:
            if memory not in members:
                members.append(memory)
        of_phase = tuple(members.index(memory) for memory in memories)
        return PhaseMemory(members=tuple(members), member_of_phase=of_phase, at=at)

    @property
    def index(self) -> int:
        """The index of this phase's target; the last one stays."""
        return min(self.phase, len(self.member_of_phase) - 1)

    @property
    def member(self) -> Memory:
        """What this phase's target remembers."""
        return self.members[self.member_of_phase[self.index]]

    def observed(self, seen: Observation) -> PhaseMemory:
        """A new phase where one begins, and the observation for all members."""
        if self.at:
            phase = sum(step <= seen.step for step in self.at)
        else:
            phase = self.phase + (0 < seen.lr <= self.lr_before / 2)
        members = self.members
        if phase != self.phase:  # before the observation, which is the first of the new phase
            members = tuple(memory.entered(seen.step) for memory in members)
        return replace(
            self,
            phase=phase,
            lr_before=seen.lr or self.lr_before,
            members=tuple(memory.observed(seen) for memory in members),
        )

    def mixed_plainly(self, seen: Observation, distance: float) -> PhaseMemory:
        """For all members."""
        members = tuple(memory.mixed_plainly(seen, distance) for memory in self.members)
        return replace(self, members=members)

    def save(self) -> dict[str, Any]:
        """What changes in training, and what members save."""
        members = [memory.save() for memory in self.members]
        return {"phase": self.phase, "lr_before": self.lr_before, "members": members}

    def load(self, saved: dict[str, Any]) -> PhaseMemory:
        """What changes in training, and what members load."""
        pairs = zip(self.members, saved["members"], strict=True)
        return replace(
            self,
            phase=saved["phase"],
            lr_before=saved["lr_before"],
            members=tuple(memory.load(own) for memory, own in pairs),
        )


def _present(seen: Observation) -> tuple[FloatArray | None, FloatArray | None]:
    """Return gradients and points of the workers that have both; None where no gradient is usable.

    A row of NaN is a worker without a gradient: the estimate uses the others.
    """
    gradients_nm, points_nm = seen.gradients, seen.points
    if gradients_nm is None:
        return None, None
    present_n = ~np.isnan(gradients_nm).all(axis=1)
    if points_nm is not None:
        present_n &= ~np.isnan(points_nm).all(axis=1)
        points_nm = points_nm[present_n]
    gradients_nm = gradients_nm[present_n]
    if not present_n.any() or not np.isfinite(gradients_nm).all():
        return None, None
    return gradients_nm, points_nm


@lru_cache(1)
def _calibration(schedule: Schedule) -> int:
    """Return how many plain steps a calibration takes: 4/p, so that the second half is stationary.

    A squared distance forgets its start at the rate p. On graphs so slow that this is capped, the
    measured distance is below the stationary one, and the target tighter than asked for.
    """
    rate = mixing_rate(schedule)  # raises where the schedule does not conserve the mean
    steps = 4 / rate if rate > 0 else math.inf
    return math.ceil(min(max(steps, _SHORTEST_CALIBRATION), _LONGEST_CALIBRATION))
