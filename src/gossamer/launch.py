"""Workers of which each may end without the others: one process each, and the store beside them.

torchrun's agent ends all its workers when one fails. This one lets the others go on, as
``decentralize(on_failure="continue")`` does, and holds the store that they agree through.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple

from gossamer.errors import UserError
from gossamer.lifeline import end_with_parent

_POLL_S = 0.1
_END_S = 10.0
"""How long workers have after SIGTERM."""


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


def launch(
    command: Sequence[str], place: Place, say: Callable[[str], object] = lambda line: None
) -> int:
    """Run a command once per worker until all have ended; return 0 where any ended in order.

    Args:
        command: the program and its arguments.
        place: how many, and where among others.
        say: told about each worker that ends otherwise.
    """
    total = place.total or place.num_workers
    if place.num_workers < 1 or place.first < 0 or place.first + place.num_workers > total:
        raise UserError(
            "the workers of a supervisor must be some of all, got "
            f"{place.num_workers} from rank {place.first} on of {total}; give --workers here, "
            "--first and the --total of all nodes"
        )
    host, _, port = (place.store or "127.0.0.1:0").rpartition(":")
    if not host or not port.isdecimal() or (not place.store and total != place.num_workers):
        raise UserError(
            f"supervisors of several nodes need one store, got {place.store!r}; give --store "
            "host:port, the node of rank 0 and a free port of it"
        )
    with _store(host, int(port), holds=place.first == 0) as port:
        environment = {
            **os.environ,
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(total),
            "LOCAL_WORLD_SIZE": str(place.num_workers),
            # No worker is to hold the store, as under torchrun.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        workers = {
            place.first + local: subprocess.Popen(
                command,
                env={**environment, "RANK": str(place.first + local), "LOCAL_RANK": str(local)},
                preexec_fn=partial(end_with_parent, signal.SIGTERM),  # even where this is killed
            )
            for local in range(place.num_workers)
        }
        return _follow(workers, say)


@contextlib.contextmanager
def _store(host: str, port: int, *, holds: bool) -> Generator[int]:
    if not holds:
        yield port
        return
    # Here, and not above: torch takes seconds to import, which workers of other nodes need not.
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        del store


def _follow(workers: dict[int, subprocess.Popen[bytes]], say: Callable[[str], object]) -> int:
    """Wait for all workers; end them where this process is ended."""
    codes: dict[int, int] = {}
    try:
        while len(codes) < len(workers):
            for rank, process in workers.items():
                code = process.poll()
                if code is not None and rank not in codes:
                    codes[rank] = code
                    if code:
                        left = len(workers) - len(codes)
                        say(f"worker {rank} ended with {_name(code)}; {left} others here go on")
            time.sleep(_POLL_S)
    finally:
        for process in workers.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _END_S
        for process in workers.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return 0 if 0 in codes.values() else 1


def _name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
