"""Load of the store when many ranks start, and when all of them fail at once.

    python -m benchmarks.store [--clients 64,256,1008]

Clients are threads of one process, each with its own connection to a TCPStore in another process,
as torchrun's agent hosts it. They run the handshake of ``decentralize()`` for a model of 100
tensors; then one of them does not respond and all others look up the cause of a failed collective,
as they do when it is killed. Prints requests and seconds of both; the seconds are mostly overhead
of Python's threads, which share a processor, and so an upper bound.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Annotated, Any

import torch.distributed as dist
import typer
from torch.distributed import (
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from gossamer.gossip.causes import Cause, find_cause
from gossamer.gossip.handshake import shake_hands
from gossamer.gossip.notices import Notice, NoticeBoard

_TIMEOUT = timedelta(seconds=120)
_FACTS = {f"parameter layers.{layer}.weight": "float32 [256, 256]" for layer in range(100)}


class CountingStore(Store):
    """A store that counts its requests."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.requests = Counter[str]()

    def set(self, key: str, value: str) -> None:  # noqa: D102
        self.requests["set"] += 1
        self._store.set(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:  # noqa: D102
        self.requests["compare_set"] += 1
        return self._store.compare_set(key, expected_value, desired_value)

    def get(self, key: str) -> bytes:  # noqa: D102
        self.requests["get"] += 1
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:  # noqa: D102
        self.requests["add"] += 1
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:  # noqa: D102
        self.requests["check"] += 1
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = _TIMEOUT) -> None:  # noqa: D102
        self.requests["wait"] += 1
        self._store.wait(keys, timeout)


def measure(num_clients: int) -> dict[str, Any]:
    """Return the requests of a start and of a common failure."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    holder = context.Process(target=_hold_store, args=(theirs,), daemon=True)
    holder.start()
    port: int = ours.recv()
    try:
        with ThreadPoolExecutor(num_clients) as pool:
            # Concurrently: if a host name cannot be resolved, torch waits for a timeout each time.
            stores = [*pool.map(lambda _: _connect(port), range(num_clients))]
            groups = [dist.ProcessGroup(s, r, num_clients) for r, s in enumerate(stores)]
            boards = [*pool.map(lambda group: NoticeBoard(group, _TIMEOUT), groups)]
            start = _timed(pool, boards, stores, lambda board: shake_hands(board, _FACTS))
            found: set[Cause] = set()
            survivors = [board for board in boards if board.rank != num_clients // 2]
            failure = _timed(pool, survivors, stores, lambda board: found.add(_fail(board)))
    finally:
        holder.kill()
    return {
        "clients": num_clients,
        **{f"start_{name}": value for name, value in start.items()},
        **{f"failure_{name}": value for name, value in failure.items()},
        "causes": sorted({cause.reason for cause in found}),
    }


def _connect(port: int) -> CountingStore:
    return CountingStore(TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT))


def _fail(board: NoticeBoard) -> Cause:
    """Fail like a rank whose collective has lost a peer."""
    others = tuple(rank for rank in range(board.size) if rank != board.rank)
    own = Notice(rank=board.rank, step=7, what="an average", peers=others, final=True)
    return find_cause(board, own, lost=True)


def _timed(
    pool: ThreadPoolExecutor,
    boards: list[NoticeBoard],
    stores: list[CountingStore],
    do: Callable[[NoticeBoard], object],
) -> dict[str, float]:
    before = sum(store.requests.total() for store in stores)
    began = time.perf_counter()
    list(pool.map(do, boards))
    seconds = time.perf_counter() - began
    requests = sum(store.requests.total() for store in stores) - before
    return {"s": seconds, "requests": requests, "requests_per_client": requests / len(stores)}


def _hold_store(pipe: Any) -> None:
    _allow_descriptors()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(3600)


def _allow_descriptors() -> None:
    """Raise the limit of open files to what the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "64,256,1008",
) -> None:
    """Measure the load of the store, a line for each number of clients."""
    _allow_descriptors()
    for number in clients.split(","):
        print(json.dumps(measure(int(number))), flush=True)


if __name__ == "__main__":
    typer.run(main)
