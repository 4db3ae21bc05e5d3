"""How many threads a run has, and how idle threads wait: as the user set it, or to share cores.

By default idle OpenMP threads spin for milliseconds, which is fastest on a quiet machine. Beside
any other busy process they occupy a core that the thread they wait for needs, and a step takes up
to fifty times as long. Threads that sleep at once wake up on the core of the thread that wakes
them: two of them are slower than one. ``python -m benchmarks.contention`` measures it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

import torch

_COUNT = "OMP_NUM_THREADS"
_WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

WAIT = {"GOMP_SPINCOUNT": "1000"}
"""Idle threads of runs spin for about 10 µs, then sleep. Results do not depend on it."""

_WORTH = 3
"""The fewest cores per run with which it gets several threads: on a quiet machine a second thread
shortens a step by a third at most, and on a busy one it makes it longer."""


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_per_run(jobs: int) -> int:
    """Return the number of threads of each of several concurrent runs.

    ``OMP_NUM_THREADS`` decides if it is set. Otherwise a run has one thread, or its share of the
    cores if that is three or more, and at most as many as this process, whose script may have
    called ``torch.set_num_threads``.
    """
    if _COUNT in os.environ:
        return torch.get_num_threads()
    cores = count_cores() // jobs
    return min(torch.get_num_threads(), cores) if cores >= _WORTH else 1


@contextlib.contextmanager
def variables_of_runs() -> Generator[None]:
    """Set the variables that OpenMP reads, for processes that are started in this block.

    numpy reads its number of threads on import: one, because runs share the cores; torch's number
    is set in each run. Variables that the user has set are not changed.
    """
    own = {} if any(name in os.environ for name in _WAITS) else WAIT
    added = {name: value for name, value in ({_COUNT: "1"} | own).items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
