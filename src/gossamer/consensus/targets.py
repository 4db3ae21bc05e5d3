"""Targets: how far apart workers may be, at every step.

A target is an immutable value; what it remembers between steps is a separate memory, which it
creates and which observations update (``memories.py``). A new target is one class here, with a
memory there where it needs one, and one row in ``catalogue.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

from gossamer.consensus.checks import check_kind, check_positive
from gossamer.consensus.memories import (
    CriticalDistance,
    GradientNorm,
    Memory,
    PhaseMemory,
    PlainDistance,
)
from gossamer.consensus.observation import Needs, Observation
from gossamer.errors import UserError
from gossamer.registry import PlugInError
from gossamer.topology import Schedule

PLAIN = math.inf
"""No bound on the distance: one round of the schedule per step."""

EXACT = -math.inf
"""The exact average, whatever a policy's limits. Distinct from zero, which is a very small distance
to be reached as far as the limits allow."""


@runtime_checkable
class Target(Protocol):
    """How far apart workers may be after mixing.

    Each method gets the memory that ``remember`` created, updated by all observations since.
    """

    def remember(self, schedule: Schedule, step: int) -> Any:
        """Return the initial memory at a step; ``Memory()`` is the empty one."""
        ...

    def value(self, seen: Observation, memory: Any) -> float:
        """Return the distance, or one of the sentinels ``PLAIN`` and ``EXACT``."""
        ...

    def needs(self, memory: Any) -> Needs:
        """Return which parts of the next observation are read."""
        ...


@final
@dataclass(frozen=True)
class Plain:
    """No target: one round of the schedule per step."""

    def remember(self, schedule: Schedule, step: int) -> Memory:
        """Nothing."""
        return Memory()

    def value(self, seen: Observation, memory: Memory) -> float:
        """Infinite."""
        return PLAIN

    def needs(self, memory: Memory) -> Needs:
        """Nothing."""
        return Needs()


@final
@dataclass(frozen=True)
class Exact:
    """The exact average at every step: one round of the complete graph, run as an all-reduce."""

    def remember(self, schedule: Schedule, step: int) -> Memory:
        """Nothing."""
        return Memory()

    def value(self, seen: Observation, memory: Memory) -> float:
        """Beyond zero."""
        return EXACT

    def needs(self, memory: Memory) -> Needs:
        """Nothing."""
        return Needs()


@final
@dataclass(frozen=True)
class Constant:
    """c·Ξ_max, a fraction of the distance that plain gossip has.

    Ξ_max is calibrated once: the first steps, or those of the first phase with such a target, run
    plain gossip, and Ξ/η is averaged over the second half of them, when the transient of the start
    or of the previous phase has decayed. Since Ξ is proportional to the learning rate η, Ξ_max is
    that average times the rate of the step. Later phases keep the average: a new calibration would
    take steps without control.
    """

    c: float

    def __post_init__(self) -> None:
        check_positive("constant", "c", self.c, "use exact for the exact average")

    def remember(self, schedule: Schedule, step: int) -> PlainDistance:
        """The distance of plain gossip."""
        return PlainDistance.on(schedule, step)

    def value(self, seen: Observation, memory: PlainDistance) -> float:
        """c·Ξ_max; infinite during calibration."""
        plain = memory.at(seen.step)
        return PLAIN if plain is None else self.c * plain * seen.lr

    def needs(self, memory: PlainDistance) -> Needs:
        """Sketches."""
        return Needs(sketches=True)


@final
@dataclass(frozen=True)
class Adaptive:
    """s·φ, where φ² is the moving average of the mean squared gradient norm of the workers."""

    s: float

    def __post_init__(self) -> None:
        check_positive("adaptive", "s", self.s, "use exact for the exact average")

    def remember(self, schedule: Schedule, step: int) -> GradientNorm:
        """φ²."""
        return GradientNorm()

    def value(self, seen: Observation, memory: GradientNorm) -> float:
        """s·φ; infinite before the first gradient."""
        return self.s * math.sqrt(memory.square.mean) if memory.square.weight else PLAIN

    def needs(self, memory: GradientNorm) -> Needs:
        """Sketches of parameters and gradients."""
        return Needs(sketches=True, gradients=True)


@final
@dataclass(frozen=True)
class CriticalTarget:
    """A fraction of the estimated critical distance Γ; see ``critical.py`` for how good that is."""

    share: float = 1.0

    def __post_init__(self) -> None:
        check_positive("critical", "share", self.share, "use exact for the exact average")

    def remember(self, schedule: Schedule, step: int) -> CriticalDistance:
        """What Γ is estimated from."""
        return CriticalDistance()

    def value(self, seen: Observation, memory: CriticalDistance) -> float:
        """share·Γ; infinite before Γ is known."""
        known = memory.estimate.estimate(seen.lr)
        return PLAIN if known is None else self.share * known.distance

    def needs(self, memory: CriticalDistance) -> Needs:
        """Everything."""
        return Needs(sketches=True, gradients=True, points=True)


@final
@dataclass(frozen=True)
class Phases:
    """A target for each phase of training; the last one stays.

    Kong et al.'s "dec-phase-2" is ``phases(exact, constant(c=0.5), exact)``.

    Args:
        targets: one per phase.
        at: the steps at which a new phase begins. Without them a phase begins where the learning
            rate falls to half or less from one step to the next; a smooth decay begins none, but
            for its last steps where it ends at zero.
    """

    targets: tuple[Target, ...]
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_kind("phases", "targets", self.targets, tuple)
        check_kind("phases", "at", self.at, tuple)
        for step in self.at:
            check_kind("phases", "each step in at", step, int)
        if not self.targets or not all(_is_simple(target) for target in self.targets):
            raise UserError(
                f"phases needs a target for each phase, got {self.targets}; "
                "for instance phases(constant(c=0.25), plain)"
            )
        if self.at and len(self.at) != len(self.targets) - 1:
            raise UserError(
                f"phases needs one step in `at` between each two of its {len(self.targets)} "
                f"targets, got at={self.at}; give {len(self.targets) - 1}, or none to follow the "
                "learning rate"
            )
        if any(step < 1 for step in self.at) or list(self.at) != sorted(set(self.at)):
            raise UserError(
                f"phases needs steps in `at` that grow from 1 on, got at={self.at}; sort them"
            )

    @staticmethod
    def of(target: Target) -> Phases:
        """Return a target as that of every phase: its memory may depend on where phases begin."""
        return target if isinstance(target, Phases) else Phases((target,))

    def remember(self, schedule: Schedule, step: int) -> PhaseMemory:
        """The phase, and what the targets of all phases remember."""
        memories = [target.remember(schedule, step) for target in self.targets]
        for target, memory in zip(self.targets, memories, strict=True):
            if not isinstance(memory, Memory):
                raise PlugInError(
                    f"a target's memory must be a gossamer.consensus.Memory, got {memory!r} "
                    f"of {target}; derive a frozen dataclass from it"
                )
        return PhaseMemory.of(memories, self.at)

    def value(self, seen: Observation, memory: PhaseMemory) -> float:
        """What this phase's target says."""
        return self.targets[memory.index].value(seen, memory.member)

    def needs(self, memory: PhaseMemory) -> Needs:
        """What this phase's target reads."""
        return self.targets[memory.index].needs(memory.member)


def _is_simple(target: Any) -> bool:
    return isinstance(target, Target) and not isinstance(target, Phases)
