"""About how long an experiment will take, from a few steps of each kind of run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from gossamer.engine import RunSpec, run
from gossamer.records import Evaluation, Step

_FIRST, _THEN = 6, 4
"""Steps before the measured ones, in which an engine chooses how to compute, and measured ones."""

_START_S = 15.0
"""What torchrun takes to start and end processes."""


class _Kind(NamedTuple):
    """What runs must have in common to take about equally long."""

    workload: str
    workers: int
    topology: str
    order: str
    gossip_steps: int
    optimizer: str
    control: str
    batch_size: int
    dtype: str
    evaluate_replicas: int


class _Cost(NamedTuple):
    step_s: float
    evaluation_s: float


def estimate_s(
    runs: Sequence[RunSpec],
    jobs: int,
    track: Callable[[Sequence[RunSpec]], Iterable[RunSpec]] = iter,
) -> float:
    """Return about how many seconds all runs take.

    Measures a few steps and an evaluation of one simulated run of each kind. Distributed runs come
    one after the other, and are taken for simulated ones; no budget is taken into account.

    Args:
        runs: all of them.
        jobs: runs at a time.
        track: yields the runs that are measured, and may show how many are left.
    """
    one_of = {_kind(spec): spec for spec in reversed(runs)}
    measured = {_kind(spec): _measure(spec) for spec in track(list(one_of.values()))}
    together = alone = 0.0
    for spec in runs:
        step_s, evaluation_s = measured[_kind(spec)]
        evaluations = -(-spec.epochs // spec.evaluate_every)
        taken = step_s * spec.num_steps + evaluation_s * evaluations
        if spec.engine == "simulated":
            together += taken
        else:
            alone += taken + _START_S
    return together / min(jobs, len(runs)) + alone


def _kind(spec: RunSpec) -> _Kind:
    return _Kind(*(getattr(spec, name) for name in _Kind._fields))


def _measure(spec: RunSpec) -> _Cost:
    few = {
        "engine": "simulated",
        "epochs": 1,
        "steps_per_epoch": _FIRST + _THEN,
        "log_every": 1,
        **dict.fromkeys(("max_steps", "max_bytes", "max_train_s")),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each of several runs at a time
    try:
        times: dict[int, float] = {}
        last_s = evaluated_s = 0.0
        for record in run(RunSpec.model_validate(spec.model_dump() | few)):
            now = time.perf_counter()
            if isinstance(record, Step):
                times[record.step] = record.train_s
                last_s = now
            elif isinstance(record, Evaluation):
                evaluated_s = now - last_s
    finally:
        torch.set_num_threads(threads)
    # A run that diverges has fewer steps.
    steps = [b - a for a, b in itertools.pairwise(times.values())] or list(times.values())
    return _Cost(sum(steps[-_THEN:]) / len(steps[-_THEN:]), evaluated_s)
