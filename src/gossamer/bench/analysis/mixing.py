"""How a run's workers were connected, from its schedule and its records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.algorithms import parse_algorithm
from gossamer.engine import CENTRALIZED
from gossamer.engine.spec import adapted_schedule
from gossamer.errors import UserError
from gossamer.records import Step
from gossamer.registry import is_plugin
from gossamer.topology import Schedule

LONGEST_PERIOD = 4096
"""The longest period of schedules whose rounds are counted one by one."""


def schedule_of(spec: Mapping[str, Any]) -> Schedule | None:
    """Return the rounds of a run; None if it is centralized, or if they come from a plug-in.

    Records are data: a plug-in that they name may be any code, and reading them must not run it.
    """
    if spec["topology"] == CENTRALIZED or any(map(is_plugin, _named(spec))):
        return None
    return adapted_schedule(*_named(spec), spec["workers"], spec["steps_per_epoch"], spec["every"])


def _named(spec: Mapping[str, Any]) -> tuple[str, str]:
    return spec["algorithm"], spec["topology"]


def mixing_facts(spec: Mapping[str, Any], steps: Sequence[Step]) -> dict[str, Any]:
    """Return the columns of a run that describe how it mixed; None where unknown.

    - ``connections``: neighbours that a worker receives from per step, mean over training
    - ``averages_every``: the interval of a method that mixes in one of so many steps, as local SGD
    - ``aimed``: whether a control had a target in any recorded step
    - ``acted``: whether it mixed in any of them differently from the schedule alone
    """
    try:
        schedule = schedule_of(spec)
    except UserError:  # the name no longer exists; the records are enough
        schedule = None
    degrees: list[int] = []
    if schedule and schedule.period and schedule.period <= LONGEST_PERIOD:
        degrees = [schedule.round(step).degree for step in range(schedule.period)]
    rare = degrees.count(0) == len(degrees) - 1 > 0
    controlled = spec["control"] != "plain" and bool(steps)
    acts = controlled and schedule is not None
    return {
        "connections": _connections(spec, degrees, steps),
        "averages_every": len(degrees) if rare else None,
        "aimed": any(map(_aimed, steps)) if controlled else None,
        "acted": any(_acted(spec, schedule, step) for step in steps) if acts else None,
    }


def _connections(
    spec: Mapping[str, Any], degrees: Sequence[int], steps: Sequence[Step]
) -> float | None:
    """Return the mean over the schedule's period, because logged steps may be a biased sample of
    it. If it has no period, or a control decides, return the mean over the records.
    """
    if degrees and spec["control"] == "plain":
        return float(spec["gossip_steps"] * sum(degrees) / len(degrees))
    heard = [step.degree * step.rounds for step in steps]
    return sum(heard) / len(heard) if heard else None


def _aimed(step: Step) -> bool:
    return step.target is not None and math.isfinite(step.target)


def _acted(spec: Mapping[str, Any], schedule: Schedule | None, step: Step) -> bool:
    if schedule is None:
        return False
    # Under awc a record has the rounds of the next step.
    overlaps = parse_algorithm(spec["algorithm"]).overlaps
    plain = schedule.round(step.step if overlaps else step.step - 1)
    return (step.rounds, step.degree) != (spec["gossip_steps"], plain.degree)
