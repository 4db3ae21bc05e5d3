"""Workers of which each may end without the others: one process each, and the store beside them.

torchrun's agent ends all its workers when one fails. This one lets the others go on, as
``decentralize(on_failure="continue")`` does, holds the store that they agree through, and starts a
worker anew that ended, which then joins them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
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
"""How long workers have after SIGTERM."""

RESTARTS = 3
"""How often a worker is started anew: a fault that passes is over by then, an error of the program
is not, and should be seen soon."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Before a worker is started anew; twice as long every time."""

_STEADY_S = 600.0
"""A worker that has run for so long has got over what it was started anew for."""

OVER_MIN = 30.0
"""How long workers have after the first ended in order: one that stands still would keep all."""

_NOT_STARTED = -1


class Place(NamedTuple):
    """Where the workers of one supervisor stand among those of all."""

    num_workers: int
    """How many it starts."""

    first: int = 0
    """The rank of its first; the supervisor of rank 0 holds the store."""

    total: int = 0
    """How many there are on all nodes; 0 for those of this one."""

    store: str = ""
    """The store's host and port, as in node0:29400; by default a free port of this machine."""

    joins: bool = False
    """Whether its workers are new, and join a job that others have started."""


def launch(
    command: Sequence[str],
    place: Place,
    say: Callable[[str], object] = lambda line: None,
    *,
    restarts: int = RESTARTS,
    over_min: float = OVER_MIN,
) -> int:
    """Run a command once per worker until all have ended; return 0 where any ended in order.

    A worker that ends otherwise is started anew, and joins those who go on.

    Args:
        command: the program and its arguments.
        place: how many, and where among others.
        say: told about each worker that ends otherwise.
        restarts: how often each worker is started anew, at most, or until it has run for long.
        over_min: minutes that the others have when one has ended in order; then they are ended.
    """
    total = place.total or place.num_workers + (place.first if place.joins else 0)
    if place.num_workers < 1 or place.first < 0 or place.first + place.num_workers > total:
        raise UserError(
            "the workers of a supervisor must be some of all, got "
            f"{place.num_workers} from rank {place.first} on of {total}; give --workers here, "
            "--first and the --total of all nodes"
        )
    if restarts < 0:
        raise UserError(f"restarts must be 0 or more, got {restarts}; 0 starts each worker once")
    if over_min < 0:
        raise UserError(f"minutes to come to an end must be 0 or more, got {over_min:g}")
    if place.joins and place.first == 0:
        raise UserError(
            "workers that join must have numbers that nobody has, got --join from rank 0 on, which "
            "began the job; give --first, such as the number of workers that there are"
        )
    alone = total == place.num_workers and not place.joins
    host, _, port = (place.store or "127.0.0.1:0").rpartition(":")
    if not host or not port.isdecimal() or (not place.store and not alone):
        raise UserError(
            f"supervisors of several nodes need one store, got {place.store!r}; give --store "
            "host:port, the node of rank 0 and a free port of it"
        )
    variables = {**os.environ}
    holds = place.first == 0 and not place.joins
    with hold_store(host, int(port)) if holds else contextlib.nullcontext(int(port)) as port:
        environment = {
            **variables,
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(total),
            "LOCAL_WORLD_SIZE": str(place.num_workers),
            # No worker is to hold the store, as under torchrun.
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
    """One worker's process, and those that come after it.

    Args:
        command: the program and its arguments.
        environment: what all workers know.
        rank: among all workers.
        local_rank: among those here.
        restarts: how often it is started anew, at most.
        joins: whether others have begun before it was started first.
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
        """When it is started anew, where it has no process."""
        self.code: int | None = None
        """How it ended for good."""
        self._command = command
        self._environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        self._pause_s = _FIRST_PAUSE_S
        self._started_at = 0.0
        # One that was new opened nothing with others, so it is new again when it comes back.
        self._joins, self._returns = (NEW, NEW) if joins else ("", RETURNED)

    def start(self) -> None:
        """Start its process; one that joins others is told so."""
        environment = {**self._environment}
        if self._joins:
            # The group of init_process_group() must not wait for those who began long ago.
            environment |= {JOINS: self._joins, "TORCH_GLOO_LAZY_INIT": "1"}
        self._joins = self._returns
        self._started_at = time.monotonic()
        self.process = subprocess.Popen(
            self._command,
            env=environment,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # even where this is killed
        )

    def note_end(self) -> None:
        """Let it be started anew as often as at first, where it has run for long."""
        if time.monotonic() - self._started_at > _STEADY_S:
            self.restarts_left, self._pause_s = self._restarts, _FIRST_PAUSE_S

    def plan_restart(self) -> float:
        """Let it be started anew after a while, which is longer every time; return how long."""
        self.restarts_left -= 1
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.process, self.starts_at = None, time.monotonic() + pause_s
        return pause_s


@contextlib.contextmanager
def hold_store(host: str, port: int = 0) -> Generator[int]:
    """Hold a store that workers reach at a host of this machine; yield its port.

    torch's server looks up the host name of every client, on the one thread that answers all of
    them. Where a resolver does not answer, that takes seconds each, in which members of a gossip
    take each other for gone. So this process has no resolver meanwhile: glibc reads the variable
    when a thread looks something up for the first time.
    """
    # Here, and not above: torch takes seconds to import, which workers of other nodes need not.
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(
            f"the host of the store must have an address, got {host!r} ({error}); give --store "
            "the name or address of this node"
        ) from error
    before = os.environ.get("RES_OPTIONS")
    os.environ["RES_OPTIONS"] = f"{before or ''} attempts:0"
    try:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False)
        yield store.port
        del store
    finally:
        if before is None:
            del os.environ["RES_OPTIONS"]
        else:
            os.environ["RES_OPTIONS"] = before


def _follow(
    workers: Sequence[_Worker], say: Callable[[str], object], *, over_s: float, alone: bool
) -> int:
    """Wait for all workers, and start those anew that end before training does.

    Args:
        workers: of this supervisor.
        say: told about each that ends.
        over_s: how long the others have when one has ended in order.
        alone: whether there are no others, so that nobody can join where all of these have ended.
    """
    over_since = None
    while running := [worker for worker in workers if worker.code is None]:
        for worker in running:
            _look_after(worker, workers, say, alone=alone)
        if over_since is None and any(worker.code == 0 for worker in workers):
            over_since = time.monotonic()
        if over_since is not None and time.monotonic() - over_since > over_s:
            left = [worker for worker in running if worker.code is None]
            _end(left)
            for worker in left:
                worker.code = _NOT_STARTED
                say(f"worker {worker.rank} is ended: others came to their end {over_s:.0f} s ago")
        time.sleep(_POLL_S)
    return 0 if any(worker.code == 0 for worker in workers) else 1


def _look_after(
    worker: _Worker, workers: Sequence[_Worker], say: Callable[[str], object], *, alone: bool
) -> None:
    others = [other for other in workers if other is not worker]
    is_over = any(other.code == 0 for other in others)
    nobody_left = alone and not any(other.process and other.code is None for other in others)
    if worker.process is None:
        if is_over or nobody_left:
            worker.code = _NOT_STARTED
            say(f"worker {worker.rank} is not started anew: {_over(is_over)}")
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
    ended = f"worker {worker.rank} ended with {_name(code)}; {going_on} others here go on"
    if not worker.restarts_left or is_over or nobody_left:
        worker.code = code
        say(ended + (f", and it stays away: {_over(is_over)}" if is_over or nobody_left else ""))
    else:
        left = worker.restarts_left - 1
        pause_s = worker.plan_restart()
        say(f"{ended}; it comes back in {pause_s:g} s, and {left} more times at most")


def _over(is_over: bool) -> str:
    return "training is at its end" if is_over else "nobody is left to join"


def _end(workers: Sequence[_Worker]) -> None:
    """End those that still run, where this process is ended."""
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
