"""Targets: how far apart workers may be, at every step.

A target is a frozen value that reads an observation and what a controller remembers, and says a
distance: infinite asks for plain gossip. Zero is a very small distance, to be met as far as limits
allow; the exact average is what ``Exact`` asks for. What a controller remembers is one small State
for all of them, so a new target is one class here and one row in ``controls.py``.
"""

# n: workers, m: floats in a sketch

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, Protocol, cast, final, runtime_checkable

import numpy as np

from gossamer.consensus.critical import CriticalState, Smoothed
from gossamer.errors import UserError
from gossamer.topology.round import FloatArray


@final
@dataclass(frozen=True, kw_only=True)
class Observation:
    """What all ranks know when they decide how to mix: the same bits on each of them."""

    step: int
    """The step whose mixing is decided."""

    lr: float
    """The learning rate of that step. Under awc, of the step before: the round of step t + 1 is
    decided inside step t, before a scheduler moves."""

    sketches: FloatArray | None = None
    """Sketches [n, m] of what is to be mixed. Under awc, of what was to be mixed a step before: the
    round is chosen before the step that it mixes has been taken."""

    gradients: FloatArray | None = None
    """Sketches [n, m] of each worker's gradient; NaN for workers without one."""

    points: FloatArray | None = None
    """Sketches [n, m] of the parameters at which those gradients were taken; under awc these are
    what is mixed."""


class Needs(NamedTuple):
    """Which parts of an observation are read."""

    sketches: bool = False
    gradients: bool = False
    points: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class State:
    """What a controller remembers between steps."""

    phase: int = 0
    lr_before: float = 0.0
    """The learning rate of the observation before; the last one above zero."""

    calibrates_from: int = 0
    """The step from which the distance of plain gossip is measured."""

    calibrates_until: int = 0
    """The step at which calibration ends."""

    plain_total: float = 0.0
    """Sum of (Ξ/η)² under plain gossip, in the second half of the calibration."""

    plain_count: int = 0
    lr_max: float = 0.0
    """The highest learning rate so far."""

    gradient2: Smoothed = field(default_factory=Smoothed)
    """Mean square φ² of the workers' gradient norms."""

    critical: CriticalState = field(default_factory=CriticalState)
    held: int = 0
    """What was chosen last, for steps at which nothing is observed."""

    def plain_distance(self, step: int) -> float | None:
        """Return Ξ/η of plain gossip, or None while it is not known."""
        if step < self.calibrates_until or self.plain_count == 0:
            return None
        return math.sqrt(self.plain_total / self.plain_count)

    @property
    def digest(self) -> str:
        """A short hash of all numbers, for ranks to compare."""
        # Of their bits: a text of the sketches in ``critical`` would take milliseconds.
        numbers = np.array(_numbers(self), dtype=np.float64)
        return hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, lists and dicts, for a checkpoint or JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> State:
        """Return the state that ``to_dict`` described."""
        return _restored(State, saved)


def _numbers(value: Any) -> Sequence[float]:
    """Return what a number, a tuple of them, or a dataclass of such values holds."""
    if is_dataclass(value):
        return [n for entry in fields(value) for n in _numbers(getattr(value, entry.name))]
    return cast("tuple[float, ...]", value) if isinstance(value, tuple) else (value,)


def _restored(kind: type[Any], saved: dict[str, Any]) -> Any:
    """Return a dataclass from its dict; fields may be dataclasses, and tuples that became lists."""
    start = kind()
    values: dict[str, Any] = {}
    for name in (entry.name for entry in fields(kind)):
        value: Any = saved[name]
        if isinstance(value, dict):
            value = _restored(type(getattr(start, name)), cast("dict[str, Any]", value))
        elif isinstance(value, list):
            value = tuple(cast("list[Any]", value))
        values[name] = value
    return kind(**values)


@runtime_checkable
class Target(Protocol):
    """How far apart workers may be after mixing."""

    def value(self, seen: Observation, state: State) -> float:
        """Return the distance: infinite for plain gossip."""
        ...

    def needs(self, state: State) -> Needs:
        """Return what is read of the next observation."""
        ...


@final
@dataclass(frozen=True)
class Plain:
    """No target: one round of the schedule per step."""

    def value(self, seen: Observation, state: State) -> float:
        """Infinite."""
        return math.inf

    def needs(self, state: State) -> Needs:
        """Nothing."""
        return Needs()


@final
@dataclass(frozen=True)
class Exact:
    """The exact average at every step: one round of the complete graph, run as an all-reduce."""

    def value(self, seen: Observation, state: State) -> float:
        """Zero."""
        return 0.0

    def needs(self, state: State) -> Needs:
        """Nothing."""
        return Needs()


@final
@dataclass(frozen=True)
class Constant:
    """c·Ξ_max, a share of the distance that plain gossip has.

    Ξ_max is measured, once: the first steps, or those of the first phase with such a target, run
    plain gossip, and Ξ/η is averaged over the second half of them, when what the start or the phase
    before left behind has been mixed away. Since Ξ is proportional to the learning rate η, Ξ_max is
    that average times the rate of the step. Later phases keep the average: a new one would take
    steps of plain gossip, without control.
    """

    c: float

    def __post_init__(self) -> None:
        _check_positive("constant", "c", self.c, "use exact for the exact average")

    def value(self, seen: Observation, state: State) -> float:
        """c·Ξ_max; infinite during calibration."""
        plain = state.plain_distance(seen.step)
        return math.inf if plain is None else self.c * plain * seen.lr

    def needs(self, state: State) -> Needs:
        """Sketches."""
        return Needs(sketches=True)


@final
@dataclass(frozen=True)
class Adaptive:
    """s·φ, where φ² is the moving average of the mean squared gradient norm of the workers."""

    s: float

    def __post_init__(self) -> None:
        _check_positive("adaptive", "s", self.s, "use exact for the exact average")

    def value(self, seen: Observation, state: State) -> float:
        """s·φ; infinite before the first gradient."""
        return self.s * math.sqrt(state.gradient2.mean) if state.gradient2.weight else math.inf

    def needs(self, state: State) -> Needs:
        """Sketches of parameters and gradients."""
        return Needs(sketches=True, gradients=True)


@final
@dataclass(frozen=True)
class CriticalTarget:
    """A share of the estimated critical distance Γ; see ``critical.py`` for what it is worth."""

    share: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("critical", "share", self.share, "use exact for the exact average")

    def value(self, seen: Observation, state: State) -> float:
        """share·Γ; infinite before Γ is known."""
        estimate = state.critical.estimate(seen.lr)
        return math.inf if estimate is None else self.share * estimate.distance

    def needs(self, state: State) -> Needs:
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

    def value(self, seen: Observation, state: State) -> float:
        """What this phase's target says."""
        return self.current(state).value(seen, state)

    def needs(self, state: State) -> Needs:
        """What this phase's target reads."""
        return self.current(state).needs(state)

    def current(self, state: State) -> Target:
        """The target of this phase."""
        return self.targets[min(state.phase, len(self.targets) - 1)]


def observed(state: State, seen: Observation, at: tuple[int, ...], calibration: int) -> State:
    """Return the state with the phase, rates and gradients of an observation.

    Args:
        state: what is remembered so far.
        seen: the observation.
        at: steps at which phases begin; empty to follow the learning rate.
        calibration: how many steps a calibration takes.
    """
    if at:
        phase = sum(step <= seen.step for step in at)
    else:
        phase = state.phase + (0 < seen.lr <= state.lr_before / 2)
    if phase != state.phase and state.plain_distance(seen.step) is None:
        state = replace(
            state,
            calibrates_from=seen.step + calibration // 2,
            calibrates_until=seen.step + calibration,
            plain_total=0.0,
            plain_count=0,
        )
    state = replace(
        state,
        phase=phase,
        lr_before=seen.lr or state.lr_before,
        lr_max=max(state.lr_max, seen.lr),
    )
    return state if seen.gradients is None else _with_gradients(state, seen.gradients, seen.points)


def _with_gradients(state: State, gradients_nm: FloatArray, points_nm: FloatArray | None) -> State:
    """Return the state with one more observation of gradients; one that overflowed is left out.

    Rows of nothing but NaN are of workers that have no gradient: the others tell enough.
    """
    present_n = ~np.isnan(gradients_nm).all(axis=1)
    if points_nm is not None:
        present_n &= ~np.isnan(points_nm).all(axis=1)
        points_nm = points_nm[present_n]
    gradients_nm = gradients_nm[present_n]
    if not present_n.any() or not np.isfinite(gradients_nm).all():
        return state
    square = float(np.sum(gradients_nm**2)) / len(gradients_nm)
    state = replace(state, gradient2=state.gradient2.add(square))
    if points_nm is None or not np.isfinite(points_nm).all():
        return state
    return replace(state, critical=state.critical.observe(points_nm, gradients_nm))


def calibrated(state: State, seen: Observation, distance: float) -> State:
    """Return the state with one more distance of plain gossip, if this step calibrates.

    Args:
        state: what is remembered so far.
        seen: the observation.
        distance: Ξ after this step's one round of the schedule.
    """
    calibrates = seen.step >= state.calibrates_from and state.plain_distance(seen.step) is None
    if not calibrates or math.isnan(distance) or seen.lr == 0:
        return state
    total = state.plain_total + (distance / seen.lr) ** 2
    return replace(state, plain_total=total, plain_count=state.plain_count + 1)


def _is_simple(target: Any) -> bool:
    return isinstance(target, Target) and not isinstance(target, Phases)


def check_kind(what: str, name: str, value: object, *kinds: type) -> None:
    """Refuse a value of another kind; True is no number."""
    if type(value) is bool or not isinstance(value, kinds):
        raise UserError(
            f"{what} needs {kinds[0].__name__} for {name}, got {value!r}; give one of that kind"
        )


def _check_positive(what: str, name: str, value: float, remedy: str) -> None:
    check_kind(what, name, value, float, int)
    if not 0 < value < math.inf:
        raise UserError(f"{what} needs a finite {name} > 0, got {name}={value}; {remedy}")
