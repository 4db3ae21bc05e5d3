"""Estimate the duration of an experiment: from records, from a few steps, or by extrapolation."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from gossamer import workloads
from gossamer.bench.store import Store
from gossamer.engine import RunSpec, run
from gossamer.records import Step

BUDGET_S = 20.0
"""How long measuring may take, apart from the step in progress."""

_FIRST, _THEN = 2, 4
"""Warm-up steps, of which the first chooses how to compute, and measured steps."""

_START_S = 15.0
"""The time that torchrun takes to start and end processes."""


class Estimate(NamedTuple):
    """The time of all runs, and how it was found."""

    seconds: float | None
    """In training steps; None if too little is known."""

    recorded: int
    """The number of kinds of run that have records."""

    measured: int
    """The number of kinds whose steps were measured."""

    guessed: int
    """The number of other kinds, extrapolated by parameters, batch size and workers."""


class _Kind(NamedTuple):
    """The fields that determine the time of a step."""

    workload: str
    workers: int
    topology: str
    algorithm: str
    every: int
    gossip_steps: int
    optimizer: str
    control: str
    wire: str
    fragments: int
    batch_size: int
    dtype: str
    evaluate_replicas: int
    engine: str


def estimate(
    runs: Sequence[RunSpec],
    jobs: int,
    store: Store,
    *,
    budget_s: float = 0.0,
    track: Callable[[Sequence[RunSpec]], Iterable[RunSpec]] = iter,
) -> Estimate:
    """Estimate the seconds of training steps of all runs.

    Evaluations and the start of processes are not included. Distributed runs are run one by one;
    if only simulated ones have records, distributed ones are estimated by them. Budgets of the
    experiment are ignored.

    Args:
        runs: all of them.
        jobs: runs at a time.
        store: may have records of earlier runs.
        budget_s: how long to measure kinds without records, those with the largest share first; by
            default nothing is measured.
        track: yields the runs that are measured, and may show progress.
    """
    one_of = {_kind(spec): spec for spec in reversed(runs)}
    recorded = _recorded(store, one_of)
    missing = [spec for kind, spec in one_of.items() if kind not in recorded]
    measured: dict[_Kind, float] = {}
    if missing and budget_s > 0:
        parts: defaultdict[_Kind, float] = defaultdict(float)
        for spec in runs:
            parts[_kind(spec)] += _size(spec) * spec.num_steps
        missing.sort(key=lambda spec: parts[_kind(spec)], reverse=True)
        measured = _measured(missing, budget_s, track)
    known = recorded | measured
    guessed: dict[_Kind, float] = {}
    for kind, spec in one_of.items():
        if kind not in known:
            near = [other for other in known if other.workload == kind.workload]
            near = near or [*measured]  # of another model, which is a rough guess
            if not near:
                return Estimate(None, len(recorded), len(measured), 0)
            guessed[kind] = _in_proportion(spec, [(one_of[other], known[other]) for other in near])
    seconds = _total(runs, jobs, known | guessed)
    return Estimate(seconds, len(recorded), len(measured), len(guessed))


def _total(runs: Sequence[RunSpec], jobs: int, step_s: Mapping[_Kind, float]) -> float:
    together: list[float] = []
    alone = 0.0
    for spec in runs:
        taken = step_s[_kind(spec)] * spec.num_steps
        if spec.engine == "simulated":
            together.append(taken)
        else:
            alone += taken + _START_S
    return max(sum(together) / jobs, max(together, default=0.0)) + alone


def _kind(spec: RunSpec) -> _Kind:
    return _Kind(*(getattr(spec, name) for name in _Kind._fields))


def _size(spec: RunSpec) -> float:
    """Return a quantity that the time of a step is roughly proportional to."""
    return _num_parameters(spec.workload) * spec.batch_size * spec.workers


@cache
def _num_parameters(workload: str) -> int:
    with torch.random.fork_rng(devices=[]):
        model = workloads.find(workload).make_model()
    return max(1, sum(parameter.numel() for parameter in model.parameters()))


def _in_proportion(spec: RunSpec, known: Sequence[tuple[RunSpec, float]]) -> float:
    """Extrapolate a step's time from the run with the nearest size and the most equal fields."""

    def how_far(other: RunSpec) -> tuple[float, int]:
        ratio = abs(math.log(_size(spec) / _size(other)))
        return ratio, sum(a != b for a, b in zip(_kind(spec), _kind(other), strict=True))

    nearest, step_s = min(known, key=lambda pair: how_far(pair[0]))
    return step_s * _size(spec) / _size(nearest)


def _recorded(store: Store, kinds: Container[_Kind]) -> dict[_Kind, float]:
    """Return the step time of kinds that have ended runs."""
    found: defaultdict[_Kind, list[float]] = defaultdict(list)
    for run_id in store.run_ids():
        started, ended = store.started(run_id), store.ended(run_id)
        if started is None or ended is None or ended.steps == 0:
            continue
        # A field that older records lack makes a kind that no run has.
        fields = {"wire": "fp32", "fragments": 1, **started.spec}  # defaults of older records
        kind = _Kind(*(fields.get(name) for name in _Kind._fields))  # pyright: ignore[reportArgumentType]
        if kind in kinds:
            found[kind].append(ended.train_s / ended.steps)
    return {kind: statistics.median(times) for kind, times in found.items()}


def _measured(
    specs: Sequence[RunSpec],
    budget_s: float,
    track: Callable[[Sequence[RunSpec]], Iterable[RunSpec]],
) -> dict[_Kind, float]:
    """Return the step time of as many kinds as the budget allows, at least of the first."""
    found: dict[_Kind, float] = {}
    deadline = time.monotonic() + budget_s
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as concurrent runs have
    try:
        for spec in track(specs):
            left = deadline - time.monotonic()
            if left > 0:  # at most half of it, to leave time for the others
                found[_kind(spec)] = _measure(spec, left / 2)
    finally:
        torch.set_num_threads(threads)
    return found


def _measure(spec: RunSpec, most_s: float) -> float:
    """Return the time of a step, measured over at least one step, and more if time allows."""
    few: dict[str, Any] = {
        "engine": "simulated",
        "epochs": 1,
        "steps_per_epoch": _FIRST + _THEN,
        "log_every": 1,
        **dict.fromkeys(("max_steps", "max_bytes", "max_train_s")),
    }
    began = time.monotonic()
    times = [0.0]
    for record in run(RunSpec.model_validate(spec.model_dump() | few)):
        if isinstance(record, Step):
            times.append(record.train_s)
            # Stop before the evaluation, which may take longer than all steps.
            if len(times) > _FIRST + _THEN or time.monotonic() - began > most_s:
                break
    steps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.fmean(steps[1:][-_THEN:] or steps)
