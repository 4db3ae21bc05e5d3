"""Ranks as threads: each runs on a process group of its own, over real Gloo on loopback.

Nothing in the library reads the global process group, so a rank can be a thread; a test then costs
milliseconds where processes cost seconds.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

Result = TypeVar("Result")


def run_ranks(
    num_ranks: int,
    body: Callable[[ProcessGroup], Result],
    timeout: float = 40,
    store: HashStore | None = None,
) -> list[Result]:
    """Run ``body(process_group)`` once per rank; return the results in the order of ranks.

    The first failure of a rank is raised here, with that rank's traceback. The store is a new one
    unless ranks are to find what earlier ones left.
    """
    store = store or HashStore()
    results: dict[int, Result] = {}
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            # A bare group: rank, size and store are all that a transport takes from it.
            results[rank] = body(dist.ProcessGroup(store, rank, num_ranks))
        except BaseException as error:
            failures.append((rank, error))  # formatted below: in Python 3.11, by one thread only

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    while len(results) < num_ranks and not failures and time.monotonic() < deadline:
        time.sleep(0.002)
    if failures:  # the others would only wait for the one that failed
        rank, error = failures[0]
        raise AssertionError(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}")
    assert len(results) == num_ranks, f"only ranks {sorted(results)} ended within {timeout} s"
    return [results[rank] for rank in range(num_ranks)]
