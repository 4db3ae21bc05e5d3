"""The supervisor of ``gossamer launch``: it starts workers, restarts failed ones, holds the store.

torchrun's agent ends all its workers when one fails. This supervisor lets the others continue, as
``decentralize(on_failure="continue")`` needs, and restarts the failed worker, which then joins
them. It must outlive all workers: they agree on members through its store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
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
"""How often a worker is restarted: enough for a transient fault, and few enough for a bug in the
program to show soon."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Before a worker is restarted; doubled every time."""

_STEADY_S = 600.0
"""A worker that has run for so long has all its restarts again."""

OVER_MIN = 30.0
"""How long the others may take after the first worker succeeded: a hung one would keep the job."""

_STORE_PROGRAM = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
print(store.port, flush=True)
while True:
    time.sleep(3600)
"""
"""Serves until it is killed."""

_NOT_STARTED = -1


class Place(NamedTuple):
    """Which of all workers a supervisor starts."""

    num_workers: int
    """How many it starts."""

    first: int = 0
    """The rank of its first worker; the supervisor of rank 0 holds the store."""

    total: int = 0
    """The number of workers on all nodes; 0 if all are on this one."""

    store: str = ""
    """Host and port of the store, as in node0:29400; by default a free port of this machine."""

    joins: bool = False
    """Whether its workers are new, and join a running job."""


def launch(
    command: Sequence[str],
    place: Place,
    say: Callable[[str], object] = lambda line: None,
    *,
    restarts: int = RESTARTS,
    over_min: float = OVER_MIN,
) -> int:
    """Run a command once per worker until all have ended; return 0 if any succeeded, else 1.

    A worker that fails is restarted, and joins the others.

    Args:
        command: the program and its arguments.
        place: how many workers, and their ranks.
        say: called with a line about each worker that fails.
        restarts: how often each worker is restarted; one that has run for long gets all again.
        over_min: minutes that the others may run after one has succeeded; then they are terminated.
    """
    total = place.total or place.num_workers + (place.first if place.joins else 0)
    if place.num_workers < 1 or place.first < 0 or place.first + place.num_workers > total:
        raise UserError(
            "the ranks of a supervisor's workers must be within those of the job, got "
            f"{place.num_workers} workers from rank {place.first} of {total}; pass --workers of "
            "this node, its --first rank, and the --total of all nodes"
        )
    if restarts < 0:
        raise UserError(f"restarts must be 0 or more, got {restarts}; 0 starts each worker once")
    if over_min < 0:
        raise UserError(f"--over must be 0 minutes or more, got {over_min:g}; 30 is the default")
    if place.joins and place.first == 0:
        raise UserError(
            "new workers must have ranks that no other has, got --join from rank 0, which belongs "
            "to the start of the job; pass --first, such as the number of workers so far"
        )
    alone = total == place.num_workers and not place.joins
    host, _, port = (place.store or "127.0.0.1:0").rpartition(":")
    if not host or not port.isdecimal() or (not place.store and not alone):
        raise UserError(
            f"supervisors of several nodes need one store, got {place.store!r}; pass --store "
            "host:port, the node of rank 0 and a free port there"
        )
    holds = place.first == 0 and not place.joins
    with hold_store(host, int(port)) if holds else contextlib.nullcontext(int(port)) as port:
        environment = {
            **os.environ,
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(total),
            "LOCAL_WORLD_SIZE": str(place.num_workers),
            # As under torchrun, no worker holds the store: it would end with that worker.
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
    """One worker: its process, and the processes that replace it.

    Args:
        command: the program and its arguments.
        environment: variables that all workers have in common.
        rank: among all workers.
        local_rank: among those of this supervisor.
        restarts: how often it may be restarted.
        joins: whether its first process already joins a running job.
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
        """When it will be restarted, if it has no process."""
        self.code: int | None = None
        """Exit code of the last process, once it is not restarted any more."""
        self._command = command
        self._environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        self._pause_s = _FIRST_PAUSE_S
        self._started_at = 0.0
        # A new worker took no part in the start of the job, so a restarted one is still new: as
        # RETURNED it would look for a gossip that it had opened.
        self._joins, self._returns = (NEW, NEW) if joins else ("", RETURNED)

    def start(self) -> None:
        """Start a process; a variable tells it whether it joins a running job."""
        environment = {**self._environment}
        if self._joins:
            # Else init_process_group() would connect to all ranks, of which some are gone.
            environment |= {JOINS: self._joins, "TORCH_GLOO_LAZY_INIT": "1"}
        self._joins = self._returns
        self._started_at = time.monotonic()
        self.process = subprocess.Popen(
            self._command,
            env=environment,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # even if this process is killed
        )

    def note_end(self) -> None:
        """Restore all restarts if the process ran for long."""
        if time.monotonic() - self._started_at > _STEADY_S:
            self.restarts_left, self._pause_s = self._restarts, _FIRST_PAUSE_S

    def plan_restart(self) -> float:
        """Schedule a restart after a pause, which doubles every time; return the pause."""
        self.restarts_left -= 1
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.process, self.starts_at = None, time.monotonic() + pause_s
        return pause_s


@contextlib.contextmanager
def hold_store(host: str, port: int = 0) -> Generator[int]:
    """Run a store that workers reach at a host name of this machine; yield its port.

    torch's server looks up the host name of every client, on the one thread that answers all of
    them. If a resolver does not answer, each lookup takes seconds, in which members count each
    other as lost. So the store has a process of its own that resolves no names: glibc reads
    RES_OPTIONS at most once per process.
    """
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(
            f"the host of the store must have an address, got {host!r} ({error}); pass --store "
            "the name or address of this node"
        ) from error
    options = f"{os.environ.get('RES_OPTIONS', '')} attempts:0"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _STORE_PROGRAM, address, str(port)],
        env={**os.environ, "RES_OPTIONS": options},
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for workers, which need the store to end in order
        preexec_fn=partial(end_with_parent, signal.SIGKILL),
    ) as process:
        assert process.stdout is not None
        try:
            listens_at = process.stdout.readline().strip()
            if not listens_at:
                raise UserError(
                    f"the store must be able to listen at {host}:{port}, and ended with the error "
                    "above; pass --store another port of this node"
                )
            yield int(listens_at)
        finally:
            process.kill()


def _follow(
    workers: Sequence[_Worker], say: Callable[[str], object], *, over_s: float, alone: bool
) -> int:
    """Wait for all workers, and restart those that fail while training continues.

    Args:
        workers: of this supervisor.
        say: called with a line about each that fails.
        over_s: how long the others may run after one has succeeded.
        alone: whether there are no other supervisors, so that nobody can join once all have failed.
    """
    over_since = None
    while running := [worker for worker in workers if worker.code is None]:
        for worker in running:
            _poll(worker, workers, say, alone=alone)
        if over_since is None and any(worker.code == 0 for worker in workers):
            over_since = time.monotonic()
        if over_since is not None and time.monotonic() - over_since > over_s:
            hung = [worker for worker in running if worker.code is None]
            _end(hung)
            for worker in hung:
                worker.code = _NOT_STARTED
                say(f"worker {worker.rank} is terminated: others finished {over_s:.0f} s ago")
        time.sleep(_POLL_S)
    return 0 if any(worker.code == 0 for worker in workers) else 1


def _poll(
    worker: _Worker, workers: Sequence[_Worker], say: Callable[[str], object], *, alone: bool
) -> None:
    """Start a worker whose pause is over, or note the exit code of its process."""
    others = [other for other in workers if other is not worker]
    is_over = any(other.code == 0 for other in others)
    nobody_left = alone and not any(other.process and other.code is None for other in others)
    if worker.process is None:
        if is_over or nobody_left:
            worker.code = _NOT_STARTED
            say(f"worker {worker.rank} is not restarted: {_why_over(is_over)}")
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
    num_running = sum(other.code is None and other.process is not None for other in others)
    ended = f"worker {worker.rank} ended with {_name(code)}; {num_running} others here continue"
    if not worker.restarts_left or is_over or nobody_left:
        worker.code = code
        say(ended + (f"; no restart: {_why_over(is_over)}" if is_over or nobody_left else ""))
    else:
        left = worker.restarts_left - 1
        pause_s = worker.plan_restart()
        say(f"{ended}; restart in {pause_s:g} s, {left} more after that")


def _why_over(is_over: bool) -> str:
    return "training is over" if is_over else "no worker is left to join"


def _end(workers: Sequence[_Worker]) -> None:
    """Terminate the workers that still run, and kill those that do not end."""
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
