"""Run an experiment: each run in its own process, several at a time, and no run twice."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Protocol, final

from gossamer.bench import child
from gossamer.bench.experiment import Experiment
from gossamer.bench.matrix import expand
from gossamer.bench.norms import affordable
from gossamer.bench.planned import planned_runs
from gossamer.bench.store import Store, StoreError
from gossamer.bench.threads import count_cores, threads_per_run, variables_of_runs
from gossamer.bench.trials import Trials
from gossamer.engine import RunSpec
from gossamer.engine.checkpoints import EVERY_S
from gossamer.engine.environment import environment
from gossamer.memory import free_bytes
from gossamer.records import RESULTS, Ended, Started, Status

_ON_A_LIFELINE = "gossamer.fork_server"
"""A string, because the runner itself must not import the module."""

_POLL_S = 0.2
_LAST_WORDS_S = 10.0
"""How long a process may take to end after SIGTERM."""


class Listener(Protocol):
    """Receives the progress of an experiment."""

    def planned(self, runs: Sequence[RunSpec], done: int) -> None:
        """These runs are planned, and so many have ended before; called again when more follow."""
        ...

    def started(self, spec: RunSpec) -> None:
        """A run has started."""
        ...

    def advanced(self, spec: RunSpec, step: int) -> None:
        """A run has taken so many steps."""
        ...

    def ended(self, spec: RunSpec, ended: Ended, metric: float | None) -> None:
        """A run has ended; with the metric of its average model, if it was evaluated."""
        ...


def run_experiment(
    experiment: Experiment,
    store: Store,
    listener: Listener,
    *,
    jobs: int | None = None,
    retry: bool = False,
    checkpoint_s: float = EVERY_S,
) -> None:
    """Run all runs that have not ended; interrupted ones resume from their checkpoints.

    Args:
        experiment: which runs there are.
        store: where records are written; locked during the call.
        listener: receives progress.
        jobs: runs at a time; by default the number of cores. Distributed runs are run one by one.
        retry: run failed runs again; the records of the failed attempt are kept.
        checkpoint_s: seconds between two checkpoints of a run; 0 for none.
    """
    cores = count_cores()

    def run(pending: Sequence[RunSpec]) -> None:
        for engine, most in (("simulated", jobs or cores), ("distributed", 1)):
            chosen = deque(spec for spec in pending if spec.engine == engine)
            if chosen:
                most = min(most, len(chosen))
                # The ranks of a distributed run share the cores among themselves.
                threads = threads_per_run(most if engine == "simulated" else cores)
                budget = _budget(most, threads, experiment.norms_mb, checkpoint_s)
                _Pool(store, listener, most, budget, experiment.timeout_s).run(chosen)

    trials = Trials(store)
    matrix = expand(experiment, trials.outcomes())
    with store.locked(experiment.text, planned_runs(matrix).model_dump_json()):
        begun: set[str] = set()
        while pending := _pending(store, matrix.runs, begun, retry=retry):
            store.drop_checkpoints([s.id for s in matrix.runs if is_pending(store, s, retry=True)])
            for spec in pending:
                store.set_aside(spec.id)
            listener.planned(pending, len(matrix.runs) - len(pending))
            run(pending)
            begun |= {spec.id for spec in pending}
            matrix = expand(experiment, trials.outcomes())
            store.plan(planned_runs(matrix).model_dump_json())
        if not begun:
            listener.planned([], len(matrix.runs))


def _pending(
    store: Store, runs: Sequence[RunSpec], begun: Container[str], *, retry: bool
) -> list[RunSpec]:
    """Return the runs that are left; each run is started once, however it ends."""
    return [s for s in runs if s.id not in begun and is_pending(store, s, retry=retry)]


def _budget(jobs: int, threads: int, norms_mb: float, checkpoint_s: float) -> child.Budget:
    """Return the budget of each of several concurrent runs."""
    free_gb = free_bytes() / 1e9 / jobs
    memory_gb = free_gb if math.isfinite(free_gb) else None
    return child.Budget(threads, memory_gb, affordable(norms_mb), checkpoint_s)


def is_pending(store: Store, spec: RunSpec, *, retry: bool) -> bool:
    """Return whether a run is left to do."""
    ended = store.ended(spec.id)
    return ended is None or (retry and ended.status not in RESULTS)


@final
@dataclass
class _ActiveRun:
    """A run in progress."""

    spec: RunSpec
    process: BaseProcess
    pipe: Connection
    began: float = math.inf
    """When its process was ready; the timeout does not include its imports."""


@final
class _Pool:
    """A pool of processes, each of which does one run."""

    def __init__(
        self,
        store: Store,
        listener: Listener,
        jobs: int,
        budget: child.Budget,
        timeout_s: float | None,
    ) -> None:
        self._store = store
        self._listener = listener
        self._most = jobs
        self._budget = budget
        self._timeout_s = timeout_s or math.inf
        self._active: list[_ActiveRun] = []
        self._context = _forkserver()

    def run(self, pending: deque[RunSpec]) -> None:
        """Do all runs."""
        try:
            while pending or self._active:
                while pending and len(self._active) < self._most:
                    self._start(pending.popleft())
                ready = wait([active.pipe for active in self._active], timeout=_POLL_S)
                for active in [active for active in self._active if active.pipe in ready]:
                    self._receive(active)
                for active in [*self._active]:
                    if time.monotonic() - active.began > self._timeout_s:
                        self._stop(active)
                        self._conclude(active, "timeout", f"took more than {self._timeout_s:g} s")
        finally:
            for active in self._active:
                active.process.terminate()  # all of them before joining the first
            for active in [*self._active]:
                self._stop(active)

    def _start(self, spec: RunSpec) -> None:
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=child.run_here,
            args=(spec.model_dump_json(), spec.id, str(self._store.folder), self._budget, there),
        )
        process.start()
        there.close()
        self._active.append(_ActiveRun(spec, process, here))
        self._listener.started(spec)

    def _receive(self, active: _ActiveRun) -> None:
        try:
            news: child.News = active.pipe.recv()
        except (EOFError, OSError):
            self._stop(active)
            self._conclude(active, "error", _how_it_died(active.process))
            return
        if isinstance(news, StoreError):
            raise news
        if isinstance(news, child.Began):
            active.began = time.monotonic()
        elif isinstance(news, child.Advanced):
            self._listener.advanced(active.spec, news.step)
        else:
            self._stop(active)
            self._listener.ended(active.spec, news.ended, news.metric)

    def _conclude(self, active: _ActiveRun, status: Status, reason: str) -> None:
        """Write the last record of a run whose process could not."""
        spec = active.spec
        ended = Ended(status=status, reason=reason)
        where = environment() | {"threads": str(self._budget.threads)} | spec.sources
        started = Started(
            run_id=spec.id,
            spec=spec.model_dump(),
            environment=where,
            workload_facts=spec.workload_facts,
        )
        self._store.conclude(started, active.process.pid or 0, ended)
        # It may have ended by itself just before it was stopped.
        self._listener.ended(spec, self._store.ended(spec.id) or ended, None)

    def _stop(self, active: _ActiveRun) -> None:
        """Terminate a process if it is alive, and join it."""
        self._active.remove(active)
        active.process.terminate()
        active.process.join(_LAST_WORDS_S)
        if active.process.is_alive():
            active.process.kill()
            active.process.join()
        active.pipe.close()


def _forkserver() -> ForkServerContext:
    """Return a context whose processes are forked after torch is imported, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_ON_A_LIFELINE, child.__name__, "sklearn.datasets"])
    with variables_of_runs():
        forkserver.ensure_running()
    return context


def _how_it_died(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}; out of memory?"
    return f"its process exited with code {code}"
