"""Ranks as processes: one pool for the whole session, forked from one that has imported torch.

For what threads cannot show: torch's own DDP, registered process groups, real process boundaries.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_START_TIMEOUT_S = 50
_CALL_TIMEOUT_S = 40


class ProcessPool:
    """A fixed number of processes in one Gloo group, that run functions sent to them."""

    def __init__(self, size: int, folder: Path) -> None:
        context = mp.get_context("forkserver")
        # What ranks would otherwise import each by itself.
        context.set_forkserver_preload(
            [
                *("gossamer", "torch._dynamo", "sklearn.datasets", "pytest", "hypothesis"),
                *("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"),
            ]
        )
        rendezvous = f"file://{folder / 'rendezvous'}"
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._broken = False
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, rendezvous, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(_START_TIMEOUT_S)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank; return the results, or raise the first failure.

        The function must be at the top of a module.
        """
        assert not self._broken, "a rank failed in an earlier test; the pool cannot go on"
        for pipe in self._pipes:
            pipe.send((function, args))
        self._broken = True  # until all have answered
        results = self._collect(_CALL_TIMEOUT_S)
        self._broken = False
        return results

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            process.kill()
            process.join(5)

    def _collect(self, timeout: float) -> list[Any]:
        results: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(timeout), f"rank {rank} did not answer within {timeout} s"
            failure, result = pipe.recv()
            assert failure is None, f"rank {rank} failed:\n{failure}"
            results.append(result)
        return results


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    pipe.send((None, None))
    while (call := pipe.recv()) is not None:
        function, args = call
        try:
            answer = None, function(*args)
        except BaseException:
            answer = traceback.format_exc(), None
        pipe.send(answer)
    dist.destroy_process_group()
