"""Modelled time: what the steps of a run would take on given links, by the runtime model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from gossamer.bench.experiment import Experiment
from gossamer.bench.modelled import Rounds
from gossamer.engine import CENTRALIZED
from gossamer.errors import UserError
from gossamer.registry import is_plugin, shorten
from gossamer.runtime_model.methods import Job
from gossamer.runtime_model.model import LONGEST_PERIOD, predict
from gossamer.runtime_model.presets import from_seconds, link_of
from gossamer.runtime_model.profile import Profile, read_profile
from gossamer.wire import parse_wire


class Mark(NamedTuple):
    """The progress of a run at one record."""

    step: int
    bytes_sent: float
    """Sent by the average worker so far."""

    degree: int
    """The most neighbours of any worker."""


@final
class Clock:
    """Predicts the time of runs at each of their records, on links that they did not run on.

    Args:
        link: between nodes, such as ``300mbit``; by default the profile's.
        profile: the file of the job that is modelled, with its sizes.
        compute_s: instead of a profile, seconds of a step without communication, by workload; sizes
            are those of the run, and every worker is on its own node.
    """

    def __init__(
        self,
        link: str = "",
        profile: Path | None = None,
        compute_s: Mapping[str, float] | None = None,
    ) -> None:
        self._rate, self._link = link, link_of(link) if link else None
        self._compute_s = {shorten(name): own for name, own in (compute_s or {}).items()}
        self._measured = None if profile is None else read_profile(profile)
        if self._measured and self._link:
            self._measured = self._measured.with_between(self._link)
        elif self._measured and self._measured.network.between is None:
            raise UserError(
                f"{profile} was measured on one node, so modelled time needs a link between nodes, "
                'got none; write for example link = "25gbit"'
            )
        self._jobs: dict[tuple[str, int], _ModelledSteps] = {}

    @property
    def link(self) -> str:
        """The name of the link in reports."""
        return self._rate or "the profile's link"

    @property
    def described(self) -> str:
        """The job and the links that are modelled, as text."""
        if self._measured is None or self._measured.network.between is None:
            each = ", ".join(f"{own:g} s for {name}" for name, own in self._compute_s.items())
            return f"a step computes {each}; every worker has a link of {self._rate}"
        network = self._measured.network
        return (
            f"the job of the profile “{self._measured.name}”, {self._measured.num_bytes / 1e6:.3g} "
            f"MB of parameters, in nodes of {network.workers_per_node} with "
            f"{self._rate or 'its own link'} between"
        )

    def seconds(
        self, spec: Mapping[str, Any], parameter_bytes: int, marks: Sequence[Mark]
    ) -> list[float] | None:
        """Return the modelled seconds at each mark; None where they cannot be predicted.

        The number of a controller's rounds is estimated from the bytes sent between two marks; they
        count as all-reduces if at the second mark every worker is a neighbour of every other.

        Args:
            spec: of the run.
            parameter_bytes: of the parameters that one worker trains; 0 if unknown.
            marks: in the order of steps.
        """
        rounds = Rounds(
            spec["workers"],
            spec["topology"],
            spec["algorithm"],
            spec["every"],
            spec["steps_per_epoch"],
            int(min(spec["epochs"] * spec["steps_per_epoch"], spec.get("max_steps") or math.inf)),
            spec["control"] != "plain",
            spec.get("wire", "fp32"),
            spec.get("fragments", 1),
        )
        steps = self._steps_of(str(spec["workload"]), parameter_bytes)
        if steps is None or not _is_known(rounds) or (rounds.controlled and not parameter_bytes):
            return None
        total_s, found = 0.0, list[float]()
        before = Mark(0, 0.0, 0)
        for mark in marks:
            num_steps, at = mark.step - before.step, (before.step + mark.step) // 2
            if num_steps:
                own, repeats = rounds, float(spec["gossip_steps"])
                if rounds.controlled:
                    if mark.degree == rounds.workers - 1:
                        own = rounds._replace(topology="complete")
                    sent = parse_wire(own.wire).num_bytes(parameter_bytes // 4, 4)
                    usual = num_steps * sent * own.copies_per_step(at)
                    repeats = (mark.bytes_sent - before.bytes_sent) / usual if usual else 0.0
                total_s += num_steps * steps.mean_s(own, at, repeats)
            before = mark
            found.append(total_s)
        return found

    def _steps_of(self, workload: str, parameter_bytes: int) -> _ModelledSteps | None:
        key = ("", 0) if self._measured else (shorten(workload), parameter_bytes)
        if key not in self._jobs:
            profile, compute_s = self._measured, self._compute_s.get(key[0])
            if self._link and compute_s and parameter_bytes:
                profile = from_seconds(compute_s, self._link, parameter_bytes)
            if profile is None:
                return None
            self._jobs[key] = _ModelledSteps(profile)
        return self._jobs[key]


def make_clocks(experiment: Experiment) -> list[Clock]:
    """Return a clock for each link of an experiment, or for its profile's; empty without either."""
    if not experiment.link and not experiment.profile:
        return []
    profile = Path(experiment.folder) / experiment.profile if experiment.profile else None
    compute_s = experiment.by_workload("compute_s")
    return [Clock(link, profile, compute_s) for link in experiment.link or [""]]


def _is_known(rounds: Rounds) -> bool:
    """Return whether a run's rounds are known without loading a plug-in."""
    if rounds.topology == CENTRALIZED:
        return True
    if is_plugin(rounds.topology) or is_plugin(rounds.algorithm):  # readers load no plug-ins
        return False
    try:
        return (rounds.schedule.period or 1) * rounds.every <= LONGEST_PERIOD
    except UserError:  # the name no longer exists
        return False


@final
class _ModelledSteps:
    """Predicted step times of one job; runs with the same rounds share predictions."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._known: dict[tuple[Rounds, int, int], float] = {}

    def mean_s(self, rounds: Rounds, at: int, repeats: float) -> float:
        """Return the mean time of a step, interpolated between integer numbers of rounds.

        Args:
            rounds: of the run.
            at: a step; ignored if rounds are periodic, because the mean is over the period.
            repeats: how often each round is done, on average.
        """
        fewer = math.floor(repeats)
        least_s = self._of(rounds, rounds.slot(at), fewer)
        if fewer == repeats:
            return least_s
        more_s = self._of(rounds, rounds.slot(at), fewer + 1)
        return least_s + (repeats - fewer) * (more_s - least_s)

    def _of(self, rounds: Rounds, at: int, repeats: int) -> float:
        key = (rounds, at, repeats)
        if key not in self._known:
            job = Job.of(self._profile, rounds.workers)
            self._known[key] = predict(rounds.method(job, at, repeats), job.trials()).mean_s
        return self._known[key]
