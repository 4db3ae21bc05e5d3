"""Runs on each host: every method of every round, each in its own forked process.

The parent imports torch once, with modules that it would import lazily, and starts no threads, so
that a fork takes milliseconds, a failure affects only its method, and the peak memory is that of
one method. Samples are printed to stdout as lines that start with SAMPLE.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from benchmarks.cluster.methods import METHODS, NODE_METHODS, Workers
from gossamer.lab.compute import EmulatedModel
from gossamer.lab.network import INTERFACE, sent_bytes

SAMPLE = "sample:"
WARMUP = 3
"""Steps before the timed ones."""

_BATCH = 4
_GROUP_TIMEOUT = timedelta(seconds=60)
_FIRST_PORT = 30000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every host measures; the same on all of them."""

    methods: list[str]
    rounds: int
    steps: int
    warmup: int
    params: int
    layers: int
    compute_ms: float
    variance: float
    timeout_s: float
    """How long one method may take in one round."""

    slow: float = 1.0
    """How much longer the first host computes than the others."""

    def to_json(self) -> str:
        """Return it as one argument of a command."""
        return json.dumps(asdict(self))


def time_method(
    task: Task, method: str, rank: int, world_size: int, round_: int = 0
) -> dict[str, float]:
    """Run one method on this host and return what its timed steps took."""
    torch.manual_seed(0)
    compute_ms = task.compute_ms * (task.slow if rank == 0 else 1.0)
    model = EmulatedModel(
        num_params=task.params,
        num_layers=task.layers,
        forward_s=compute_ms / 3e3,
        backward_s=compute_ms / 1.5e3,
        variance=task.variance,
        seed=rank + round_ * world_size,  # the same compute times for all methods of a round
    )
    batch = torch.randn(_BATCH, model.width, generator=torch.Generator().manual_seed(rank))
    step = {**METHODS, **NODE_METHODS}[method](model, Workers(rank, world_size, batch))
    for _ in range(task.warmup):
        step()
    bytes_before = _sent_bytes()
    busy_before, own_before, start = _processor_s(), time.process_time(), time.perf_counter()
    for _ in range(task.steps):
        step()
    elapsed_s = time.perf_counter() - start
    # Read all clocks first: counting bytes takes time.
    busy_s, own_s = _processor_s() - busy_before, time.process_time() - own_before
    available_s = elapsed_s * (os.cpu_count() or 1)
    return {
        "ms_per_step": elapsed_s * 1e3 / task.steps,
        "bytes_per_step": (_sent_bytes() - bytes_before) / task.steps,
        "cpu": busy_s / available_s,
        "cpu_own": own_s / available_s,
        "cpu_ms": own_s * 1e3 / task.steps,
        "peak_mb": _peak_mb(),
    }


def _sent_bytes() -> int:
    """Return the bytes sent by this host; on loopback (benchmarks.step) they are not counted."""
    return sent_bytes() if os.environ["GLOO_SOCKET_IFNAME"] == INTERFACE else 0


def _processor_s() -> float:
    """Return the time that all processors together were not idle, interrupts included."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle, waiting = fields[3], fields[4]
    return (sum(fields) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _child(task: Task, method: str, round_: int, port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", timeout=_GROUP_TIMEOUT)
    rank = dist.get_rank()
    sample: dict[str, object] = {"method": method, "round": round_, "rank": rank}
    try:
        sample |= time_method(task, method, rank, dist.get_world_size(), round_)
        dist.barrier()  # an exit resets connections that a slower host still reads from
    except Exception as error:
        traceback.print_exc()
        sample["error"] = f"{type(error).__name__}: {error}"
    print(SAMPLE + json.dumps(sample), flush=True)
    # Not destroyed: a peer may still be sending, and the process ends here anyway.
    os._exit(0)


def main() -> None:
    """Measure the task given as JSON in the first argument."""
    task = Task(**json.loads(sys.argv[1]))
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports the compiler, for 1.6 s
    fork = multiprocessing.get_context("fork")
    # One port each, because a slow host's last process may still use the previous one.
    ports = iter(range(_FIRST_PORT, 65536))
    for round_ in range(task.rounds):
        for method in task.methods:
            child = fork.Process(target=_child, args=(task, method, round_, next(ports)))
            child.start()
            child.join(task.timeout_s)
            if child.is_alive():
                child.kill()
                child.join()
            if child.exitcode != 0:
                error = f"took over {task.timeout_s} s or died: exit code {child.exitcode}"
                sample = {"method": method, "round": round_, "rank": int(os.environ["RANK"])}
                print(SAMPLE + json.dumps({**sample, "error": error}), flush=True)


if __name__ == "__main__":
    main()
