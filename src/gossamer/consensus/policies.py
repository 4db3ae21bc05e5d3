"""Policies: how to keep workers within a target distance.

Each is an immutable value; bound to a schedule and an order it becomes a controller. A new one is
one class here and one row in ``catalogue.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import numpy as np

from gossamer.consensus.checks import check_at_least, check_kind
from gossamer.consensus.controller import (
    Decision,
    TargetController,
    decided,
    mixed_distance,
)
from gossamer.consensus.distance import sketch_distance
from gossamer.consensus.observation import Needs, Observation
from gossamer.consensus.targets import PLAIN, Target
from gossamer.errors import UserError
from gossamer.topology import Round, Schedule, complete, damped, lattice, nobody
from gossamer.topology.arrays import FloatArray
from gossamer.topology.spectrum import window

_CHEAPER_BELOW = 0.9
"""Hysteresis: the fraction of the target that a cheaper candidate must come under."""

_NOISE = 1e-7
"""Distances below this fraction of the RMS norm of the sketches satisfy every target: about the
rounding of float32 parameters, which mixing cannot remove."""


@final
@dataclass(frozen=True)
class Repeat:
    """Repeat gossip until the distance is under the target (atc).

    x ← W_{t+q−1} … W_t x at step t, with the least q that comes under it. As these are the rounds
    t, t + 1, … of the schedule, repeating helps where rounds are matchings too. q is at least 1 and
    at most ``q_max``; rounds that would no longer bring workers closer are left out.

    Args:
        target: how far apart workers may be.
        q_max: the most rounds per step.
        interval: steps between observations; in between, q stays.
    """

    target: Target
    q_max: int = 64
    interval: int = 1

    def __post_init__(self) -> None:
        _check_target("repeat", self.target)
        check_at_least("repeat", "q_max", self.q_max, 1)
        check_at_least("repeat", "interval", self.interval, 1)

    def bind(self, schedule: Schedule, order: str) -> TargetController:
        """Raises under awc, which mixes once per step."""
        if order == "awc":
            raise UserError(
                "repeat mixes several times per step, got order 'awc', whose one exchange runs "
                "while the gradient is computed; use ada_consensus, which chooses whom to mix "
                "with, or order='atc'"
            )
        choose = partial(_repeat, schedule, schedule.period or window(schedule), self.q_max)
        return TargetController(self.target, choose, schedule, self.interval)


@final
@dataclass(frozen=True)
class AdaConsensus:
    """Mix once, with the cheapest round that keeps the distance under the target (atc and awc).

    The candidates are the schedule's round, ring lattices that cost more than it and less than the
    complete graph, and the complete graph. The first whose mixed sketches are within the target is
    taken; to return to a cheaper one it must come under nine tenths of the target, a hysteresis
    that keeps noise from switching back and forth.

    The cost is either bytes or neighbours. The complete graph runs as an all-reduce and sends
    less than two copies of the model, fewer than any lattice: by bytes, it is the only denser
    candidate, and the controller decides how often to use it. But it is a global barrier; by
    degree, the graph becomes denser only as far as needed, as Ada's does.

    Under awc the sketches are one step stale. They approximate those of this step: both have had
    one update since they were mixed.

    Args:
        target: how far apart workers may be.
        by: what a round costs, ``"bytes"`` that a worker sends or ``"degree"``, the neighbours that
            it waits for.
        k_max: the most neighbours; below n − 1 the complete graph is no candidate. An ``exact``
            target asks for it all the same. 0 sets no limit.
        interval: steps between observations; in between, the candidate stays.
    """

    target: Target
    by: str = "bytes"
    k_max: int = 0
    interval: int = 1

    def __post_init__(self) -> None:
        _check_target("ada_consensus", self.target)
        check_kind("ada_consensus", "by", self.by, str)
        check_kind("ada_consensus", "k_max", self.k_max, int)
        if self.by not in _COSTS:
            raise UserError(
                f"ada_consensus needs by={' or '.join(_COSTS)}, got {self.by!r}; use one of them"
            )
        if self.k_max == 1 or self.k_max < 0:
            raise UserError(
                f"ada_consensus needs k_max of at least 2, or 0 for no limit, got {self.k_max}; "
                "2 neighbours are a ring"
            )
        check_at_least("ada_consensus", "interval", self.interval, 1)

    def bind(self, schedule: Schedule, order: str) -> TargetController:
        """Acts under both orders."""
        k_max = self.k_max or schedule.num_workers - 1
        denser = _denser_than(schedule, _COSTS[self.by], k_max)
        choose = partial(_thicken, schedule, denser)
        return TargetController(self.target, choose, schedule, self.interval)


@final
@dataclass(frozen=True)
class LocalSteps:
    """Exchange only when workers are further apart than the target (atc and awc).

    Steps in between are local: the distance decides how many, where ``every`` fixes it. A schedule
    that counts exchanges advances by one round per exchange.

    Args:
        target: how far apart workers may be before they exchange.
        most: the most steps from one exchange to the next.
    """

    target: Target
    most: int = 16

    def __post_init__(self) -> None:
        _check_target("local_steps", self.target)
        check_at_least("local_steps", "most", self.most, 1)

    def bind(self, schedule: Schedule, order: str) -> TargetController:
        """Acts under both orders."""
        return TargetController(self.target, partial(_wait, schedule, self.most), schedule)


@final
@dataclass(frozen=True)
class Gamma:
    """Mix with γW + (1 − γ)I, where γ = (η/η_max)^p from a start step on (atc and awc).

    Keeps Ξ from vanishing as the learning rate η decays; η_max is the highest so far.

    Reference: Wang, DSGD with adaptive consensus (https://arxiv.org/abs/2602.02899).

    Args:
        p: how strongly γ follows the learning rate; 0 is plain gossip.
        start: the step before which γ is 1.
    """

    follows_schedule: ClassVar[bool] = True

    p: float = 1.0
    start: int = 0

    def __post_init__(self) -> None:
        check_kind("gamma", "p", self.p, float, int)
        if not 0 <= self.p < math.inf:
            raise UserError(
                f"gamma needs a finite p >= 0, got p={self.p}; 1 follows the learning rate"
            )
        check_at_least("gamma", "start", self.start, 0)

    def bind(self, schedule: Schedule, order: str) -> Damping:
        """Acts under both orders."""
        return Damping(self, schedule)


@final
class Damping:
    """γ at work on a schedule; its state is η_max, the highest learning rate so far."""

    def __init__(self, gamma: Gamma, schedule: Schedule) -> None:
        self._gamma = gamma
        self._schedule = schedule

    def start(self, step: int) -> float:
        """No rate is known before the first step."""
        return 0.0

    def needs(self, step: int, state: float) -> Needs:
        """Nothing but the learning rate."""
        return Needs()

    def decide(self, seen: Observation, state: float) -> tuple[Decision, float]:
        """Return the damped round of the schedule, and η_max."""
        lr_max = max(state, seen.lr)
        round = self._schedule.round(seen.step)
        if seen.step >= self._gamma.start and lr_max > 0:
            share = (seen.lr / lr_max) ** self._gamma.p
            round = damped(round, share) if share < 1 else round
        return decided((round,), seen, PLAIN), lr_max

    def save(self, state: float) -> dict[str, Any]:
        """Return η_max."""
        return {"lr_max": state}

    def load(self, saved: dict[str, Any]) -> float:
        """Return η_max."""
        return saved["lr_max"]


def _repeat(
    schedule: Schedule,
    period: int,
    q_max: int,
    seen: Observation,
    target: float,
    held: int,
) -> tuple[Decision, int]:
    def rounds(count: int) -> tuple[Round, ...]:
        return tuple(schedule.round(seen.step + q) for q in range(count))

    if target == PLAIN:
        return decided(rounds(1), seen, target), 1
    if seen.sketches is None or _is_at_rest(seen, target):
        # Before the first choice, 0 is held: mix at least once.
        held = min(max(1, held), q_max)
        return decided(rounds(held), seen, target), held
    enough = max(target, _floor(seen.sketches))
    mixed_nm = schedule.round(seen.step).mixed(seen.sketches)
    count, tried, distance = 1, 1, sketch_distance(mixed_nm)
    # A single matching may leave Ξ as it is: only a full period without progress ends the search.
    while distance > enough and tried < q_max and tried - count < period:
        mixed_nm = schedule.round(seen.step + tried).mixed(mixed_nm)
        tried += 1
        closer = sketch_distance(mixed_nm)
        # Only rounds up to the last that helped are run: the others would cost bytes for nothing.
        if closer < (1 - _NOISE) * distance:
            count, distance = tried, closer
    return Decision(rounds(count), distance, target), count


def _thicken(
    schedule: Schedule,
    denser: tuple[Round, ...],
    seen: Observation,
    target: float,
    held: int,
) -> tuple[Decision, int]:
    candidates = (schedule.round(seen.step), *denser)
    if target == PLAIN:
        return decided(candidates[:1], seen, target), 0
    last = len(candidates) - 1
    # Start from the last choice: a cheaper candidate must pass a lower threshold than the one that
    # the last choice has to keep, or noise would switch between two of them at every observation.
    index = min(max(0, held), last)
    if seen.sketches is None or _is_at_rest(seen, target):
        return decided((candidates[index],), seen, target), index
    floor = _floor(seen.sketches)
    enough, cheaper = max(target, floor), max(_CHEAPER_BELOW * target, floor)
    while index < last and mixed_distance([candidates[index]], seen.sketches) > enough:
        index += 1
    while index > 0 and mixed_distance([candidates[index - 1]], seen.sketches) <= cheaper:
        index -= 1
    return decided((candidates[index],), seen, target), index


def _wait(
    schedule: Schedule, most: int, seen: Observation, target: float, held: int
) -> tuple[Decision, int]:
    # One integer holds both: exchanges made, and local steps since the last of them, which are
    # always fewer than ``most``.
    exchanges, local = divmod(held, most)
    near = seen.sketches is None or sketch_distance(seen.sketches) <= target
    if target != PLAIN and near and local + 1 < most:
        return decided((nobody(schedule.num_workers),), seen, target), held + 1
    # By exchanges: if a one-peer schedule advanced with steps, a worker could get the same peer at
    # every exchange, and workers would never mix as one.
    round = schedule.round(exchanges if schedule.counts == "exchanges" else seen.step)
    return decided((round,), seen, target), (exchanges + 1) * most


def _is_at_rest(seen: Observation, target: float) -> bool:
    """Whether a target is zero only because the learning rate is: then the last choice is kept."""
    return target == 0 and seen.lr == 0


def _floor(sketches_nm: FloatArray) -> float:
    return _NOISE * float(np.linalg.norm(sketches_nm)) / math.sqrt(len(sketches_nm))


def _denser_than(
    schedule: Schedule, cost: Callable[[Round], float], k_max: int
) -> tuple[Round, ...]:
    """Return lattices that cost more than the schedule, and the complete graph, as k_max allows.

    Every even degree up to 10, then steps of a quarter: at a thousand workers two dozen candidates
    stand for five hundred.
    """
    num_workers = schedule.num_workers
    exact = (complete(num_workers),) if k_max >= num_workers - 1 else ()
    least = max(cost(schedule.round(step)) for step in range(window(schedule)))
    most = min(map(cost, exact), default=math.inf)
    lattices: list[Round] = []
    k = 2
    while k <= min(k_max, num_workers - 2):
        candidate = lattice(num_workers, k)
        if cost(candidate) >= most:  # so are all denser ones
            break
        if cost(candidate) > least:
            lattices.append(candidate)
        k = max(k + 2, k + k // 4 - k // 4 % 2)
    return (*lattices, *exact)


def _copies_sent(round: Round) -> float:
    return float(round.copies_sent.max())


def _degree(round: Round) -> float:
    return round.degree


_COSTS: dict[str, Callable[[Round], float]] = {"bytes": _copies_sent, "degree": _degree}


def _check_target(what: str, target: object) -> None:
    if not isinstance(target, Target):
        raise UserError(
            f"{what} needs a target, got {target!r}; for instance {what}(constant(c=0.25))"
        )
