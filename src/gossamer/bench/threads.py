"""How many threads a run has, and how they wait: as the user set it, or so that runs share cores.

OpenMP's threads that have nothing to do spin for milliseconds, because that is the quickest way to
go on. Beside any other busy process they spin on a core that the thread they wait for needs, and a
step takes up to fifty times as long. Threads that sleep at once are woken on the core of the one
that wakes them: two of them are slower than one. ``python -m benchmarks.contention`` measures it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

import torch

_COUNT = "OMP_NUM_THREADS"
_WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

WAIT = {"GOMP_SPINCOUNT": "1000"}
"""How threads of runs wait: for some 10 µs, then asleep. No result depends on it."""

_WORTH = 3
"""Cores per run from which on it has several threads: a second one makes a quiet machine's step
shorter by a third at most, and that of a busy one longer."""


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def threads_per_run(jobs: int) -> int:
    """Return how many threads each of so many runs at a time has.

    ``OMP_NUM_THREADS`` decides where it is set; else runs share the cores where there are three
    or more for each, and none has more threads than this process, whose script may have called
    ``torch.set_num_threads``.
    """
    if _COUNT in os.environ:
        return torch.get_num_threads()
    cores = count_cores() // jobs
    return min(torch.get_num_threads(), cores) if cores >= _WORTH else 1


@contextlib.contextmanager
def variables_of_runs() -> Generator[None]:
    """Have the variables that OpenMP reads in a process which is started here.

    numpy's threads are counted when it is imported: one, because runs share the cores; torch's are
    set in each run. What the user set stays.
    """
    own = {} if any(name in os.environ for name in _WAITS) else WAIT
    added = {name: value for name, value in ({_COUNT: "1"} | own).items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
