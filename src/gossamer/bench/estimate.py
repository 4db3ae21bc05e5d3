"""How long an experiment will take, from a few steps of each kind of run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gossamer.engine import RunSpec, run
from gossamer.records import Step

_FIRST, _THEN = 6, 4
"""Steps before the measured ones, in which an engine chooses how to compute, and measured ones."""


class Kind(NamedTuple):
    """What runs must have in common to take equally long per step, nearly."""

    workload: str
    workers: int
    batch_size: int
    dtype: str


def estimate_s(runs: Sequence[RunSpec], jobs: int) -> float:
    """Return about how many seconds all runs take, so many at a time.

    Measures a few steps of one simulated run of each kind. Evaluation is not counted, and
    distributed runs are taken for simulated ones.
    """
    measured: dict[Kind, float] = {}
    total = 0.0
    for spec in runs:
        kind = Kind(spec.workload, spec.workers, spec.batch_size, spec.dtype)
        if kind not in measured:
            measured[kind] = _seconds_per_step(spec)
        total += measured[kind] * spec.num_steps
    return total / min(jobs, len(runs))


def _seconds_per_step(spec: RunSpec) -> float:
    few = {
        "engine": "simulated",
        "epochs": 1,
        "steps_per_epoch": _FIRST + _THEN,
        "log_every": 1,
        "evaluate_replicas": 0,
    }
    short = RunSpec.model_validate(spec.model_dump() | few)
    times = [record.train_s for record in run(short) if isinstance(record, Step)]
    return (times[-1] - times[-1 - _THEN]) / _THEN
