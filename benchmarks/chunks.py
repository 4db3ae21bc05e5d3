"""The regret of the rule of ``simulate.chunks``, compared with the best of its choices.

    python -m benchmarks.chunks [--model mlp] [--model stdlib-gpt] [--workers 16 --workers 64]

One JSON line per model and number of workers: the processor time of a step by the loop, by chunks
of 8 to 128 MB of activations, and by the choice of ``gradients="auto"``, as ratios to the best.
Models are those of ``benchmarks.models``, and workloads by their names. Processor time of one
thread, which other jobs disturb little; methods are interleaved, medians over rounds.

``regret`` is the chosen method against the best; ``regret_in_memory`` against the best of those
within the memory bound of activations (docs/simulate.md, Memory): the rest is the cost of the
bound.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.models import WORKLOADS, loss_of, make_optimizer
from gossamer import Simulation, workloads

SIZES_MB = (8, 16, 24, 32, 64, 128)
LEAST_ROUNDS, MOST_ROUNDS = 3, 15


def main(
    model: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
    workers: Annotated[list[int], typer.Option(min=1)] = [4, 16, 64, 256, 1008],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="Per line, or three rounds if longer.")] = 6.0,
) -> None:
    """Print one JSON line per model and number of workers."""
    torch.set_num_threads(1)
    for name in model or [*WORKLOADS, "digits-mlp", "digits-cnn", "stdlib-gpt"]:
        for num_workers in workers:
            print(json.dumps(measure(name, num_workers, seconds)), flush=True)


def measure(name: str, num_workers: int, seconds: float) -> dict[str, Any]:
    """Return the times of all methods, and the regret of the chosen one."""
    sim, inputs, targets = make(name, num_workers)
    sim.step(inputs, targets)
    found = sim.state_dict()["gradients"]
    chosen, worker_bytes = found["chunk"], found["worker_bytes"]
    good = sim._gradients._budget.good / worker_bytes  # pyright: ignore[reportPrivateUsage]
    most = [mb * 2**20 / worker_bytes for mb in SIZES_MB]
    sizes = {equal_chunks(num_workers, size) for size in [*most, *(min(good, m) for m in most)]}
    times: dict[int, list[float]] = {way: [] for way in sorted({0, chosen, *sizes})}
    end = time.monotonic() + seconds
    for done in range(-1, MOST_ROUNDS):  # the first round warms up
        if done >= LEAST_ROUNDS and time.monotonic() > end:
            break
        for way, taken in times.items():
            set_chunk(sim, way)
            began = time.process_time()
            sim.step(inputs, targets)
            taken += [time.process_time() - began] if done >= 0 else []
    step_s = {way: statistics.median(taken) for way, taken in times.items()}
    best = min(step_s.values())
    best_in_memory = min(step_s[way] for way in times if way <= max(1, good))
    return {
        "model": name,
        "workers": num_workers,
        "worker_mb": round(worker_bytes / 1e6, 3),
        "rounds": len(times[0]),
        "chosen": chosen,
        "regret": round(step_s[chosen] / best, 3),
        "regret_in_memory": round(step_s[chosen] / best_in_memory, 3),
        "best_ms_per_worker": round(1e3 * best / num_workers, 4),
        "of_best_by_chunk": {way: round(s / best, 3) for way, s in step_s.items()},
    }


def make(name: str, num_workers: int) -> tuple[Simulation, Tensor, Tensor]:
    """Return a simulation of a model, and a batch of all workers."""
    torch.manual_seed(0)
    options: Any = {"workers": num_workers, "topology": "ring"}
    if name in WORKLOADS:
        own = WORKLOADS[name]
        inputs, targets = own.sample(num_workers, own.batch)
        return Simulation(own.build(), loss_of, make_optimizer, **options), inputs, targets
    workload = workloads.find(name)
    data = workload.load()
    chosen = torch.randint(len(data.train_inputs), (num_workers, workload.recipe.batch_size))
    inputs = workload.transform(data.train_inputs[chosen].flatten(0, 1), None)
    sim = Simulation(workload.make_model(), workload.loss, make_optimizer, **options)
    return sim, inputs.unflatten(0, chosen.shape), data.train_targets[chosen]


def equal_chunks(num_workers: int, most: float) -> int:
    """Return the size of equal chunks, as few as possible, of at most so many workers."""
    return math.ceil(num_workers / math.ceil(num_workers / max(1, int(min(num_workers, most)))))


def set_chunk(sim: Simulation, chunk: int) -> None:
    """Make a simulation use chunks of a size, 0 for the loop, through its state."""
    state = sim.state_dict()
    sim.load_state_dict(state | {"gradients": state["gradients"] | {"chunk": chunk}})


if __name__ == "__main__":
    typer.run(main)
