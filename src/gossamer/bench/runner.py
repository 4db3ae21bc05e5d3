"""Run an experiment: each run in a process of its own, several at a time, and no run twice."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Protocol, final

from gossamer.bench import child
from gossamer.bench.experiment import Experiment
from gossamer.bench.matrix import expand
from gossamer.bench.store import Store, StoreError
from gossamer.engine import RunSpec
from gossamer.engine.environment import environment
from gossamer.records import Ended, Started, Status
from gossamer.simulate.memory import free_bytes

_POLL_S = 0.2
_LAST_WORDS_S = 10.0
"""How long a process that is told to end may take."""


class Listener(Protocol):
    """Who is told how an experiment goes on."""

    def planned(self, runs: Sequence[RunSpec], done: int) -> None:
        """So many runs are to come, and so many have ended before."""
        ...

    def started(self, spec: RunSpec) -> None:
        """A run began."""
        ...

    def advanced(self, spec: RunSpec, step: int) -> None:
        """A run has taken so many steps."""
        ...

    def ended(self, spec: RunSpec, ended: Ended, metric: float | None) -> None:
        """A run came to its end; with the metric of its average model, where it got so far."""
        ...


def run_experiment(
    experiment: Experiment,
    store: Store,
    listener: Listener,
    *,
    jobs: int | None = None,
    retry: bool = False,
) -> None:
    """Run what has not ended yet.

    Args:
        experiment: what is compared.
        store: where records are kept; locked meanwhile.
        listener: who is told.
        jobs: runs at a time; by default as many as there are cores. Distributed runs come alone.
        retry: run those again that failed; what is known of them is kept.
    """
    runs = expand(experiment).runs
    with store.locked(experiment.text):
        pending = [spec for spec in runs if is_pending(store, spec, retry=retry)]
        for spec in pending:
            store.set_aside(spec.id)
        listener.planned(pending, len(runs) - len(pending))
        cores = count_cores()
        for engine, most in (("simulated", jobs or cores), ("distributed", 1)):
            chosen = deque(spec for spec in pending if spec.engine == engine)
            if chosen:
                _Pool(store, listener, min(most, len(chosen)), experiment.timeout_s).run(chosen)


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def is_pending(store: Store, spec: RunSpec, *, retry: bool) -> bool:
    """Return whether a run is still to be done."""
    ended = store.ended(spec.id)
    return ended is None or (retry and ended.status in ("error", "timeout"))


@final
@dataclass
class _Job:
    """A run that goes on."""

    spec: RunSpec
    process: BaseProcess
    pipe: Connection
    began: float = math.inf
    """When its process was there; importing what it needs does not count."""


@final
class _Pool:
    """Processes that each do one run, so many at a time."""

    def __init__(
        self, store: Store, listener: Listener, jobs: int, timeout_s: float | None
    ) -> None:
        self._store = store
        self._listener = listener
        self._most = jobs
        free = free_bytes() / 1e9 / jobs
        self._share = child.Share(
            max(1, count_cores() // jobs), free if math.isfinite(free) else None
        )
        self._timeout_s = timeout_s or math.inf
        self._jobs: list[_Job] = []
        self._context = _forkserver()

    def run(self, pending: deque[RunSpec]) -> None:
        """Do all of them."""
        try:
            while pending or self._jobs:
                while pending and len(self._jobs) < self._most:
                    self._start(pending.popleft())
                ready = wait([job.pipe for job in self._jobs], timeout=_POLL_S)
                for job in [job for job in self._jobs if job.pipe in ready]:
                    self._receive(job)
                for job in [*self._jobs]:
                    if time.monotonic() - job.began > self._timeout_s:
                        self._stop(job)
                        self._conclude(job, "timeout", f"took more than {self._timeout_s:g} s")
        finally:
            for job in self._jobs:
                job.process.terminate()  # all, before the first is waited for
            for job in [*self._jobs]:
                self._stop(job)

    def _start(self, spec: RunSpec) -> None:
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=child.run_here,
            args=(spec.model_dump_json(), str(self._store.folder), self._share, there),
        )
        process.start()
        there.close()
        self._jobs.append(_Job(spec, process, here))
        self._listener.started(spec)

    def _receive(self, job: _Job) -> None:
        try:
            news: child.News = job.pipe.recv()
        except (EOFError, OSError):
            self._stop(job)
            self._conclude(job, "error", _how_it_died(job.process))
            return
        if isinstance(news, StoreError):
            raise news
        if isinstance(news, child.Began):
            job.began = time.monotonic()
        elif isinstance(news, child.Advanced):
            self._listener.advanced(job.spec, news.step)
        else:
            self._stop(job)
            self._listener.ended(job.spec, news.ended, news.metric)

    def _conclude(self, job: _Job, status: Status, reason: str) -> None:
        """Write the end of a run that could not."""
        spec = job.spec
        ended = Ended(status=status, reason=reason)
        started = Started(run_id=spec.id, spec=spec.model_dump(), environment=environment())
        self._store.conclude(started, job.process.pid or 0, ended)
        # It may have come to its own end in the last moment.
        self._listener.ended(spec, self._store.ended(spec.id) or ended, None)

    def _stop(self, job: _Job) -> None:
        """End a process, if it has not ended; wait for it."""
        self._jobs.remove(job)
        job.process.terminate()
        job.process.join(_LAST_WORDS_S)
        if job.process.is_alive():
            job.process.kill()
            job.process.join()
        job.pipe.close()


def _forkserver() -> ForkServerContext:
    """Return what starts processes that have imported torch, which takes seconds, already.

    numpy's threads are counted when it is imported: one, because runs share the cores.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([child.__name__, "sklearn.datasets"])
    given = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if given is not None:
            os.environ["OMP_NUM_THREADS"] = given
    return context


def _how_it_died(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}; was memory short?"
    return f"its process ended with code {code}"
