"""What happens to the workers of a soak, and what comes of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.soak.job import Job, Taken

_BACK_S = 180.0
"""How long a worker may take to come back: a supervisor waits for up to a minute."""

_RECENT_BYTES = 50_000
"""Of what a worker noted: more than a thousand steps."""

Happen = Callable[[Job, Sequence[int], np.random.Generator], float]
"""Does something to workers; returns when."""


def kill(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Kill them, at one moment."""
    return max([job.signal(victim, signal.SIGKILL) for victim in victims])


def kill_twice(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Kill one, and its next process before or while it joins."""
    (victim,) = victims
    before = job.pid(victim)
    at = job.signal(victim, signal.SIGKILL)
    job.wait(lambda: job.pid(victim) != before, _BACK_S)
    time.sleep(generator.uniform(0, 5))
    job.signal(victim, signal.SIGKILL)
    return at


def stall_shortly(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Stop one for less than the timeout: nobody is lost."""
    (victim,) = victims
    at = job.signal(victim, signal.SIGSTOP)
    time.sleep(generator.uniform(0.1, 0.3) * job.spec.timeout_s)
    job.signal(victim, signal.SIGCONT)
    return at


def stall_for_long(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Stop one until the others have gone on; it raises when it is resumed."""
    (victim,) = victims
    at = job.signal(victim, signal.SIGSTOP)
    job.wait(lambda: _gone_on(job, victims, at), 3 * job.spec.timeout_s)
    job.signal(victim, signal.SIGCONT)
    return at


def cut(job: Job, victims: Sequence[int], generator: np.random.Generator) -> float:
    """Cut a worker's link until the others have gone on."""
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
"""What happens, and to how many."""

LAB_FAULTS: dict[str, tuple[Happen, int]] = {
    "cut off": (cut, 1),
    "cut off for a moment": (cut_shortly, 1),
}
_MOMENTS = {"stalled for a moment", "cut off for a moment"}


def strike(
    job: Job, name: str, victims: Sequence[int], generator: np.random.Generator
) -> dict[str, Any]:
    """Let a fault happen; return what came of it when all workers are together again."""
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
    """Return whether all others have taken a step without those who are lost."""
    for worker in _others(job, victims):
        steps = job.taken(worker, _RECENT_BYTES)
        if not any(t.at > at and not {*victims} & {*t.members} for t in steps):
            return False
    return True


def seconds_until(taken: Sequence[Taken], victims: Sequence[int], at: float) -> float:
    """Return how long after a moment a worker completed a step without those who are lost."""
    steps = (t for t in taken if t.at > at and not {*victims} & {*t.members})
    return next((t.at - at for t in steps), float("inf"))


def _longest_pause(taken: Sequence[Taken], at: float) -> float:
    return max((b.at - a.at for a, b in pairwise(taken) if b.at > at), default=float("inf"))


def missed_steps(taken: Sequence[Taken], at: float) -> int:
    """Return the steps that a worker did not take since a moment, between those that it did."""
    return sum(b.step - a.step - 1 for a, b in pairwise(taken) if b.at > at)


def _back_after(taken: Sequence[Taken], at: float) -> float:
    """Return when a worker took its first step after it had missed some."""
    found = (b.at - at for a, b in pairwise(taken) if b.at > at and b.step > a.step + 1)
    return next(found, float("inf"))
