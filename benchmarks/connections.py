"""Connections of a gossip on real processes, the time to open them, and the CPU time of a step.

    python -m benchmarks.connections [--workers 8,16,32,64,128] [--topology NAME ...]

Processes are forked from one that has imported torch, and join torch's own group first, as under
torchrun. Then, for each rank: the seconds that ``decentralize()`` takes, how many descriptors and
threads it adds, and the processor time of a training step, whose compute is emulated by a sleep;
the same for a step without gossip, because many processes on few processors have cold caches; and
for gathering all ranks' sketches, as a control does. Prints medians over ranks, and the most
descriptors of any rank.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.gossip import decentralize
from gossamer.topology import Schedule, parse

TOPOLOGIES = ("one_peer_exponential", "ring", "aer(workers_per_node=4)", "exponential")
_PATIENCE_S = 240.0
"""How long a process may take."""


class _Job(NamedTuple):
    num_workers: int
    topology: str
    steps: int
    compute_s: float


def measure(num_workers: int, topology: str, steps: int, compute_s: float) -> dict[str, Any]:
    """Return connections and costs of one gossip on real processes."""
    context = multiprocessing.get_context("fork")
    job = _Job(num_workers, topology, steps, compute_s)
    results: Any = context.Queue()
    # In its own process, as with torchrun: a process that forks must have no threads.
    holder = context.Process(target=_hold_store, args=(results,), daemon=True)
    holder.start()
    port = results.get(timeout=_PATIENCE_S)
    ranks = [
        context.Process(target=_work, args=(rank, job, port, results))
        for rank in range(num_workers)
    ]
    for process in ranks:
        process.start()
    try:
        rows = [results.get(timeout=_PATIENCE_S) for _ in ranks]
        for process in ranks:
            process.join(_PATIENCE_S)
    finally:
        for process in (*ranks, holder):
            process.kill()
    middle = {name: median(row[name] for row in rows) for name in rows[0]}
    return {
        "topology": topology,
        "workers": num_workers,
        "neighbours": max(_num_neighbours(parse(topology, num_workers))),
        **middle,
        "most_descriptors": max(row["descriptors"] for row in rows),
    }


def _num_neighbours(schedule: Schedule) -> list[int]:
    """Return how many distinct workers each one exchanges with in a period."""
    found: list[set[int]] = [set() for _ in range(schedule.num_workers)]
    for round in map(schedule.round, range(schedule.period or 1)):
        for worker, others in enumerate(found):
            own = round.neighbours(worker)
            others.update(own.receives.workers.tolist(), own.sends.workers.tolist())
    return [len(others - {worker}) for worker, others in enumerate(found)]


def _hold_store(results: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results.put(store.port)
    time.sleep(2 * _PATIENCE_S)


def _work(rank: int, job: _Job, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    began = time.perf_counter()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.num_workers)
    torch_s = time.perf_counter() - began
    model = nn.Linear(320, 320)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(8, 320)

    def take_step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    local_ms = _cpu_ms(take_step, job)
    dist.barrier()
    descriptors, threads = _count("fd"), _count("task")
    began = time.perf_counter()
    gossip = decentralize(model, optimizer, job.topology)
    row = {
        "init_process_group_s": torch_s,
        "decentralize_s": time.perf_counter() - began,
        "descriptors": _count("fd") - descriptors,
        "threads": _count("task") - threads,
    }
    row["step_cpu_ms"] = _cpu_ms(take_step, job)
    row["local_step_cpu_ms"] = local_ms
    row["sketches_cpu_ms"] = _cpu_ms(gossip.sketches, job)
    gossip.gather(0)  # no rank closes before all have counted
    results.put(row)
    gossip.close()


def _cpu_ms(work: Callable[[], object], job: _Job) -> float:
    """Return the processor time of a piece of work, of all threads, in milliseconds."""
    began = 0.0
    for step in range(job.steps + 2):
        if step == 2:
            began = time.process_time()
        time.sleep(job.compute_s)
        work()
    return 1e3 * (time.process_time() - began) / job.steps


def _count(kind: str) -> int:
    return len(os.listdir(f"/proc/self/{kind}"))


def main(
    workers: Annotated[str, typer.Option(help="Numbers of processes.")] = "8,16,32,64,128",
    topology: Annotated[list[str], typer.Option(help="Which topologies.")] = [*TOPOLOGIES],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 20,
    compute: Annotated[float, typer.Option(min=0, help="Emulated seconds per step.")] = 0.2,
) -> None:
    """Measure connections of a gossip, a line for each topology and number of processes."""
    numbers = [int(number) for number in workers.split(",")]
    torch.set_num_threads(1)
    torch.optim.SGD(nn.Linear(1, 1).parameters())  # imports modules once, before the forks
    gc.freeze()  # or each child would collect garbage in all of it when it ends
    for name in topology:
        for number in numbers:
            print(json.dumps(measure(number, name, steps, compute)), flush=True)


if __name__ == "__main__":
    typer.run(main)
