"""The supervisor of ``gossamer launch``: one process per worker, each of which may fail alone.

torchrun's agent ends all its workers when one fails. This one keeps the others running, as
``decentralize(on_failure="continue")`` needs, hosts the store through which they agree on the
membership, and restarts a failed worker, which then joins the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, final

from gossamer.errors import UserError
from gossamer.launched import JOINS, NEW, RETURNED
from gossamer.lifeline import end_with_parent

_POLL_S = 0.1
_END_S = 10.0
"""How long workers may take to end after SIGTERM."""

RESTARTS = 3
"""How often a worker is restarted: a transient fault is over by then, and a bug in the program,
which is not, should be visible soon."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Backoff before a restart; it doubles every time."""

_STEADY_S = 600.0
"""A worker that has run for this long gets all its restarts and the first backoff again."""

OVER_MIN = 30.0
"""How long the others may run after the first worker has finished: a stalled one would keep the
job alive forever."""

_NOT_STARTED = -1


class Place(NamedTuple):
    """The workers of one supervisor among those of all nodes."""

    num_workers: int
    """The number of workers that it starts."""

    first: int = 0
    """The rank of its first worker; the supervisor of rank 0 hosts the store."""

    total: int = 0
    """The number of workers on all nodes; 0 for ``num_workers``."""

    store: str = ""
    """The store's host and port, as in node0:29400; by default a free port of this machine."""

    joins: bool = False
    """Whether its workers join a running job."""


def launch(
    command: Sequence[str],
    place: Place,
    say: Callable[[str], object] = lambda line: None,
    *,
    restarts: int = RESTARTS,
    over_min: float = OVER_MIN,
) -> int:
    """Run a command once per worker until all have ended; return 0 if at least one has finished.

    A worker has finished if its exit code is 0. One that fails is restarted, and joins the others.

    Args:
        command: the program and its arguments.
        place: which workers to start.
        say: called with a line about each worker that fails.
        restarts: the most restarts of a worker; the count starts again after it has run for long.
        over_min: minutes that the others get after one has finished; then they are terminated.
    """
    total = place.total or place.num_workers + (place.first if place.joins else 0)
    if place.num_workers < 1 or place.first < 0 or place.first + place.num_workers > total:
        raise UserError(
            "the workers of a supervisor must be among those of all nodes, got "
            f"{place.num_workers} from rank {place.first} on of {total}; set --workers and --first "
            "of this node, and --total of all nodes"
        )
    if restarts < 0:
        raise UserError(f"restarts must be 0 or more, got {restarts}; 0 starts each worker once")
    if over_min < 0:
        raise UserError(
            f"--over must be 0 minutes or more, got {over_min:g}; leave it out for {OVER_MIN:g}"
        )
    if place.joins and place.first == 0:
        raise UserError(
            "workers that join must have unused ranks, got --join from rank 0 on, which started "
            "the job; set --first, for example to the number of workers that the job has"
        )
    alone = total == place.num_workers and not place.joins
    host, _, port = (place.store or "127.0.0.1:0").rpartition(":")
    if not host or not port.isdecimal() or (not place.store and not alone):
        raise UserError(
            f"supervisors of several nodes need a common store, got {place.store!r}; set --store "
            "host:port, the node of rank 0 and a free port on it"
        )
    with _store(host, int(port), holds=place.first == 0 and not place.joins) as port:
        environment = {
            **os.environ,
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(total),
            "LOCAL_WORLD_SIZE": str(place.num_workers),
            # As under torchrun: the agent hosts the store, not rank 0.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        workers = [
            _Worker(command, environment, place.first + local, local, restarts, joins=place.joins)
            for local in range(place.num_workers)
        ]
        try:
            for worker in workers:
                worker.start()
            return _follow(workers, say, over_s=60 * over_min, alone=alone)
        finally:
            _end(workers)


@final
class _Worker:
    """One worker: its current process, and its restarts.

    Args:
        command: the program and its arguments.
        environment: the variables that all workers share.
        rank: among all workers.
        local_rank: among those of this supervisor.
        restarts: the most restarts.
        joins: whether it joins a running job.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        rank: int,
        local_rank: int,
        restarts: int,
        *,
        joins: bool,
    ) -> None:
        self.rank = rank
        self.restarts_left = self._restarts = restarts
        self.process: subprocess.Popen[bytes] | None = None
        self.starts_at = 0.0
        """When it is restarted, while it has no process."""
        self.code: int | None = None
        """Its final exit code; None while it runs or will be restarted."""
        self._command = command
        self._environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        self._pause_s = _FIRST_PAUSE_S
        self._started_at = 0.0
        # A new worker has no connections that others must replace, so its restart is new too.
        self._joins, self._returns = (NEW, NEW) if joins else ("", RETURNED)

    def start(self) -> None:
        """Start its process; the environment tells whether it joins."""
        environment = {**self._environment}
        if self._joins:
            # init_process_group() must not wait for workers that have connected long ago.
            environment |= {JOINS: self._joins, "TORCH_GLOO_LAZY_INIT": "1"}
        self._joins = self._returns
        self._started_at = time.monotonic()
        self.process = subprocess.Popen(
            self._command,
            env=environment,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # even if this process is killed
        )

    def note_end(self) -> None:
        """Reset the number of restarts and the backoff if it has run for long."""
        if time.monotonic() - self._started_at > _STEADY_S:
            self.restarts_left, self._pause_s = self._restarts, _FIRST_PAUSE_S

    def plan_restart(self) -> float:
        """Schedule a restart with exponential backoff; return the backoff in seconds."""
        self.restarts_left -= 1
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.process, self.starts_at = None, time.monotonic() + pause_s
        return pause_s


@contextlib.contextmanager
def _store(host: str, port: int, *, holds: bool) -> Generator[int]:
    if not holds:
        yield port
        return
    # Imported here because torch takes seconds, and supervisors without the store do not need it.
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        del store


def _follow(
    workers: Sequence[_Worker], say: Callable[[str], object], *, over_s: float, alone: bool
) -> int:
    """Poll all workers until they have ended, and restart those that fail during training.

    Args:
        workers: of this supervisor.
        say: called with a line about each that ends.
        over_s: how long the others may run after one has finished.
        alone: whether no other node has workers: then a restarted worker may have none to join.
    """
    over_since = None
    while running := [worker for worker in workers if worker.code is None]:
        for worker in running:
            _poll(worker, workers, say, alone=alone)
        if over_since is None and any(worker.code == 0 for worker in workers):
            over_since = time.monotonic()
        if over_since is not None and time.monotonic() - over_since > over_s:
            left = [worker for worker in running if worker.code is None]
            _end(left)
            for worker in left:
                worker.code = _NOT_STARTED
                say(f"worker {worker.rank} is terminated: others finished {over_s:.0f} s ago")
        time.sleep(_POLL_S)
    return 0 if any(worker.code == 0 for worker in workers) else 1


def _poll(
    worker: _Worker, workers: Sequence[_Worker], say: Callable[[str], object], *, alone: bool
) -> None:
    others = [other for other in workers if other is not worker]
    is_over = any(other.code == 0 for other in others)
    nobody_left = alone and not any(other.process and other.code is None for other in others)
    if worker.process is None:
        if is_over or nobody_left:
            worker.code = _NOT_STARTED
            say(f"worker {worker.rank} is not restarted: {_over(is_over)}")
        elif time.monotonic() >= worker.starts_at:
            worker.start()
        return
    code = worker.process.poll()
    if code is None:
        return
    if code == 0:
        worker.code = 0
        return
    worker.note_end()
    going_on = sum(other.code is None and other.process is not None for other in others)
    ended = f"worker {worker.rank} ended with {_name(code)}; {going_on} others here are running"
    if not worker.restarts_left or is_over or nobody_left:
        worker.code = code
        say(ended + (f"; it is not restarted: {_over(is_over)}" if is_over or nobody_left else ""))
    else:
        left = worker.restarts_left - 1
        pause_s = worker.plan_restart()
        say(f"{ended}; it restarts in {pause_s:g} s, and at most {left} more times")


def _over(is_over: bool) -> str:
    return "training has finished" if is_over else "no worker is left to join"


def _end(workers: Sequence[_Worker]) -> None:
    """Terminate workers that still run, and wait for them."""
    running = [worker.process for worker in workers if worker.process is not None]
    for process in running:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _END_S
    for process in running:
        try:
            process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
