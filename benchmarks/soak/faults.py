"""The faults of a soak, and the measurement of each recovery."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.soak.job import Job, Taken

_BACK_S = 180.0
"""How long a worker may take to join again: a supervisor pauses for up to a minute."""

_RECENT_BYTES = 50_000
"""Of a worker's file of steps: more than a thousand steps."""

Happen = Callable[[Job, Sequence[int], np.random.Generator], float]
"""Causes a fault on some workers; returns the time."""


def kill(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Kill workers at the same time."""
    return max([job.signal(victim, signal.SIGKILL) for victim in victims])


def kill_twice(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Kill a worker, and the process that replaces it before or while it joins."""
    (victim,) = victims
    before = job.pid(victim)
    at = job.signal(victim, signal.SIGKILL)
    job.wait(lambda: job.pid(victim) != before, _BACK_S)
    time.sleep(generator.uniform(0, 5))
    job.signal(victim, signal.SIGKILL)
    return at


def stall_shortly(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Stop a worker for less than the timeout: nobody is lost."""
    (victim,) = victims
    at = job.signal(victim, signal.SIGSTOP)
    time.sleep(generator.uniform(0.1, 0.3) * job.spec.timeout_s)
    job.signal(victim, signal.SIGCONT)
    return at


def stall_for_long(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Stop a worker until the others continue without it; it raises when it is resumed."""
    (victim,) = victims
    at = job.signal(victim, signal.SIGSTOP)
    job.wait(lambda: _gone_on(job, victims, at), 3 * job.spec.timeout_s)
    job.signal(victim, signal.SIGCONT)
    return at


def cut(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Cut a worker's link until the others continue without it."""
    (victim,) = victims
    assert job.lab is not None
    at = time.time()
    job.lab.cut(f"host{victim}")
    job.wait(lambda: _gone_on(job, victims, at), 3 * job.spec.timeout_s)
    job.lab.restore(f"host{victim}")
    return at


def cut_shortly(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Cut a worker's link for less than the timeout: nobody is lost."""
    (victim,) = victims
    assert job.lab is not None
    at = time.time()
    job.lab.cut(f"host{victim}")
    time.sleep(generator.uniform(0.05, 0.15) * job.spec.timeout_s)
    job.lab.restore(f"host{victim}")
    return at


FAULTS: dict[str, tuple[Happen, int]] = {
    "killed": (kill, 1),
    "two killed": (kill, 2),
    "killed, and again": (kill_twice, 1),
    "stalled": (stall_for_long, 1),
    "stalled for a moment": (stall_shortly, 1),
}
"""Each fault, and the number of workers that it hits."""

LAB_FAULTS: dict[str, tuple[Happen, int]] = {
    "cut off": (cut, 1),
    "cut off for a moment": (cut_shortly, 1),
}
_MOMENTS = {"stalled for a moment", "cut off for a moment"}


def strike(
    job: Job, name: str, victims: Sequence[int], generator: np.random.Generator
) -> dict[str, Any]:
    """Cause a fault, wait until all workers train together again, and return the measurements."""
    happen, _ = {**FAULTS, **LAB_FAULTS}[name]
    others = _others(job, victims)
    lost = name not in _MOMENTS
    at = happen(job, victims, generator)
    limit_s = 2 * job.spec.timeout_s
    if lost:
        job.wait(lambda: _gone_on(job, victims, at), 2 * limit_s)
    began = time.time()
    together = job.wait(lambda: job.all_together(since=began), _BACK_S)
    taken = {worker: job.taken(worker) for worker in range(job.spec.num_workers)}
    paused = [
        seconds_until(taken[w], victims, at) if lost else _longest_pause(taken[w], at)
        for w in others
    ]
    return {
        "fault": name,
        "victims": [*victims],
        "seconds": max(paused),
        "in_time": max(paused) < limit_s,
        "steps_lost": sum(missed_steps(taken[w], at) for w in others),
        "missed": sum(missed_steps(taken[w], at) for w in victims),
        "back_s": max(_back_after(taken[w], at) for w in victims) if lost else 0.0,
        "together": together,
    }


def _others(job: Job, victims: Sequence[int]) -> list[int]:
    return [worker for worker in range(job.spec.num_workers) if worker not in victims]


def _gone_on(job: Job, victims: Sequence[int], at: float) -> bool:
    """Return whether all others have completed a step without the lost workers."""
    for worker in _others(job, victims):
        steps = job.taken(worker, _RECENT_BYTES)
        if not any(t.at > at and not {*victims} & {*t.members} for t in steps):
            return False
    return True


def seconds_until(taken: Sequence[Taken], victims: Sequence[int], at: float) -> float:
    """Return the time from a moment until a worker completed a step without the lost workers."""
    steps = (t for t in taken if t.at > at and not {*victims} & {*t.members})
    return next((t.at - at for t in steps), float("inf"))


def _longest_pause(taken: Sequence[Taken], at: float) -> float:
    return max((b.at - a.at for a, b in pairwise(taken) if b.at > at), default=float("inf"))


def missed_steps(taken: Sequence[Taken], at: float) -> int:
    """Return how many steps a worker has missed since a moment, up to its last one."""
    return sum(b.step - a.step - 1 for a, b in pairwise(taken) if b.at > at)


def _back_after(taken: Sequence[Taken], at: float) -> float:
    """Return the time from a moment to a worker's first step after those that it missed."""
    found = (b.at - at for a, b in pairwise(taken) if b.at > at and b.step > a.step + 1)
    return next(found, float("inf"))
