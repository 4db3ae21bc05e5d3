"""Rounds of a run as input of the runtime model, and budgets of modelled time."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, final

from gossamer.algorithms import parse_algorithm
from gossamer.consensus import Sketch
from gossamer.engine import CENTRALIZED, RunSpec
from gossamer.engine.spec import adapted_schedule
from gossamer.errors import ImpossibleError
from gossamer.runtime_model.methods import Job, ddp, gossip, order_of, repeating
from gossamer.runtime_model.model import TimedMethod, predict
from gossamer.runtime_model.profile import read_profile
from gossamer.topology import Schedule

_SKETCH_BYTES = 8 * Sketch().size
"""The sketch that every worker sends to all others at each step with a controller."""

_SLOTS = 64
"""The number of parts into which a run with aperiodic rounds is split."""

_WINDOW = 8
"""The most rounds at the start of a part that represent all of it."""


class Rounds(NamedTuple):
    """The fields of a run that determine its exchanges."""

    workers: int
    topology: str
    algorithm: str
    every: int
    steps_per_epoch: int
    num_steps: int
    controlled: bool = False
    wire: str = "fp32"
    fragments: int = 1

    @property
    def schedule(self) -> Schedule:
        """Its rounds, without the local steps between them."""
        return adapted_schedule(
            self.algorithm,
            self.topology,
            self.workers,
            self.steps_per_epoch,
            every=1,
            fragments=self.fragments,
        )

    def slot(self, at: int) -> int:
        """Return the first step of the part of the run that contains a step."""
        if self.topology == CENTRALIZED or self.schedule.period is not None:
            return 0
        return at // self._slot_steps * self._slot_steps

    @property
    def _slot_steps(self) -> int:
        return max(1, self.num_steps // _SLOTS)

    def near(self, at: int) -> Schedule:
        """Return a cycle of rounds from a step on; all rounds if they are periodic."""
        most = min(_WINDOW, max(1, self._slot_steps // self.every))
        return repeating(self.schedule, self.every, most=most, first=at)

    def copies_per_step(self, at: int) -> float:
        """Return how many copies of its parameters the average worker sends in a step."""
        near = self.near(self.slot(at))
        sent = [near.round(step).copies_sent.mean() for step in range(near.period or 1)]
        return float(sum(sent) / len(sent))

    def method(self, job: Job, at: int | None = None, repeats: float = 1) -> TimedMethod:
        """Return the method that the runtime model predicts.

        Args:
            job: what is trained.
            at: the first step of a part of the run; by default the entire run.
            repeats: how often each round is done.
        """
        if self.topology == CENTRALIZED:
            return ddp(job)
        return gossip(
            job._replace(algorithm=self.algorithm, wire=self.wire, fragments=self.fragments),
            schedule=self.schedule if at is None else self.near(at),
            every=self.every if at is None else 1,  # the cycle already contains it
            order=order_of(self.algorithm),
            num_steps=self.num_steps,
            repeats=repeats * parse_algorithm(self.algorithm).num_exchanges,
            gathered_bytes=_SKETCH_BYTES if self.controlled else 0,
        )


@final
class ModelledTime:
    """A budget of seconds in the job of a profile; runs that differ in seed share a prediction.

    Args:
        seconds: of modelled time.
        profile: the file of the job whose time is modelled.
    """

    def __init__(self, seconds: float, profile: Path) -> None:
        self._seconds = seconds
        self._profile = read_profile(profile)
        self._known: dict[Rounds, float] = {}

    def steps_of(self, spec: RunSpec) -> int:
        """Return the number of steps that fit, at least one; the model is the profile's."""
        if spec.control != "plain" or spec.gossip_steps > 1:
            raise ImpossibleError(
                "a budget of modelled time needs rounds that are known in advance, got control "
                f"{spec.control!r} and {spec.gossip_steps} gossip steps; use a budget of bytes or "
                "of measured time"
            )
        rounds = Rounds(
            spec.workers,
            spec.topology,
            spec.algorithm,
            spec.every,
            spec.steps_per_epoch,
            spec.num_steps,
            wire=spec.wire,
            fragments=spec.fragments,
        )
        if rounds not in self._known:
            job = Job.of(self._profile, spec.workers)
            self._known[rounds] = predict(rounds.method(job), job.trials()).mean_s
        return max(1, int(self._seconds / self._known[rounds]))
