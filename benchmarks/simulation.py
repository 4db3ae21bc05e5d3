"""Time and memory of a simulated worker-step.

    python -m benchmarks.simulation [--model mlp] [--workers 64 --workers 256] [--rounds 3] [--jax]

One JSON line per model and number of workers. Three methods for the same amount of training:

- ``simulation``: gossamer.Simulation, ring, awc; complete steps.
- ``loop``: a module and an optimizer per worker, one after the other; no mixing.
- ``batch``: one model on one batch of all workers' samples, which is the limit: the same
  arithmetic without any work per worker.

With ``--jax`` (``pip install 'gossamer[jax]'``) there are two more, complete steps as one compiled
function (``benchmarks/jax_steps.py``): ``jax_vmap`` and ``jax_map``. They must agree with our
parameters in the first steps, or it is an error. ``speed_to_jax`` is our speed divided by that of
the faster of the two; a last line has the least of all rows and the geometric mean.

They are interleaved, each for at least a quarter of a second per round. Rounds run in several
processes, because the speed of the same code varies by a fifth between processes. Figures are
medians over all rounds; fields that end in ``_by_process`` have one value per process.

``of_loop`` and ``of_batch`` are simulation time over theirs, median of the rounds' ratios.
``floor`` is a lower bound of ``of_batch`` if samples cost as much as in the batch: in addition
every worker's parameters pass through memory nine times (forward 1, gradient 1, fused SGD 5, mixing
2), at the speed of an in-place product over as much memory, timed in the same rounds. Samples cost
less if activations of a chunk stay in cache and those of the batch do not. ``peak_mb`` is the peak
memory of some steps in a fresh process, minus that before the simulation was built; ``budget_mb``
is parameters + gradients + optimizer state + one mixing buffer.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.models import WORKLOADS, Workload, loss_of, make_optimizer
from gossamer import Simulation

WARMUP = 16
"""Warm-up steps, in which caches and freed memory settle."""

LEAST_S = 0.25
"""The least time of a method per round; shorter ones would be too noisy."""

PASSES = 9
"""Reads and writes of every worker's parameters, or of as much memory, in a step."""


def main(
    model: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
    workers: Annotated[list[int], typer.Option(min=1)] = [16, 64, 256, 1008],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in each process.")] = 2,
    processes: Annotated[int, typer.Option(min=1, help="Processes that repeat the rounds.")] = 3,
    jax: Annotated[bool, typer.Option("--jax", help="Also JAX's vmap and lax.map.")] = False,
    part: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print one JSON line per model and number of workers."""
    for name in model or ():
        if name not in WORKLOADS:
            required = f"must be one of {', '.join(WORKLOADS)}, got {name!r}"
            raise typer.BadParameter(required, param_hint="--model")
    if jax and importlib.util.find_spec("jax") is None:
        missing = "needs jax, which is not installed; pip install 'gossamer[jax]'"
        raise typer.BadParameter(missing, param_hint="--jax")
    found: list[float] = []
    for name in model or WORKLOADS:
        for num_workers in workers:
            if part == "seconds":
                line = seconds_of_ways(name, num_workers, rounds, jax)
            elif part == "memory":
                line = peak_memory(WORKLOADS[name], num_workers)
            else:
                line = measure(name, num_workers, rounds, processes, jax)
            print(json.dumps(line), flush=True)
            found += [line["speed_to_jax"]] if "speed_to_jax" in line else []
    if found:
        mean = round(statistics.geometric_mean(found), 3)
        print(json.dumps({"least_speed_to_jax": min(found), "geometric_mean": mean}))


def measure(name: str, num_workers: int, rounds: int, processes: int, jax: bool) -> dict[str, Any]:
    """Return the throughput of all methods, their ratios, and the simulation's memory."""
    options = ["--model", name, "--workers", str(num_workers), "--rounds", str(rounds)]
    options += ["--jax"] if jax else []
    runs = [in_own_process("seconds", options) for _ in range(processes)]
    memory = [in_own_process("memory", options) for _ in range(processes)]
    by_process = [run["seconds"] for run in runs]
    seconds = {way: [s for one in by_process for s in one[way]] for way in by_process[0]}
    sizes = {
        "model": name,
        "parameters": sum(p.numel() for p in WORKLOADS[name].build().parameters()),
        "batch": WORKLOADS[name].batch,
        "workers": num_workers,
        "threads": runs[0]["threads"],
    }
    speed = {
        f"{way}_worker_steps_per_s": round(num_workers / statistics.median(seconds[way]))
        for way in seconds
        if way != "passes"
    }
    ratios = {
        "of_loop": median_ratio(seconds, "simulation", "loop"),
        "of_batch": median_ratio(seconds, "simulation", "batch"),
        "of_batch_by_process": [median_ratio(one, "simulation", "batch") for one in by_process],
        "floor": round(1 + PASSES / 2 * median_ratio(seconds, "passes", "batch"), 3),
    }
    if jax:
        best = min(("jax_vmap", "jax_map"), key=lambda way: statistics.median(seconds[way]))
        ratios["speed_to_jax"] = median_ratio(seconds, best, "simulation")
        ratios["speed_to_jax_by_process"] = [
            median_ratio(one, best, "simulation") for one in by_process
        ]
    peaks = [run["peak_mb"] for run in memory]
    return {
        **sizes,
        **speed,
        **ratios,
        "chunk_by_process": [run["chunk"] for run in runs],
        "peak_mb": statistics.median(peaks),
        "peak_mb_by_process": peaks,
        "budget_mb": memory[0]["budget_mb"],
    }


def in_own_process(part: str, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.simulation", "--part", part, *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(output.stdout)


def seconds_of_ways(name: str, num_workers: int, rounds: int, jax: bool) -> dict[str, Any]:
    """Return seconds per step of each method in each round, and the simulation's choice."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model = workload.build()
    inputs, targets = workload.sample(num_workers, workload.batch)
    sim = make_simulation(model, num_workers)
    ways: dict[str, Callable[[], object]] = {
        "simulation": lambda: sim.step(inputs, targets),
        "loop": loop_step(model, inputs, targets),
        "batch": batch_step(model, inputs, targets),
        "passes": pass_over(sum(p.numel() for p in sim.parameters.values())),
    }
    if jax:
        # Imported here, because JAX gets as many threads as torch has now.
        from benchmarks import jax_steps

        ways |= jax_steps.ways_that_agree(name, model, sim, inputs, targets)
    for _ in range(WARMUP):
        ways["simulation"]()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, step in ways.items():
            seconds[way].append(seconds_per_step(step))
    chunk = sim.state_dict()["gradients"]["chunk"]
    return {"seconds": seconds, "chunk": chunk, "threads": torch.get_num_threads()}


def make_simulation(model: nn.Module, num_workers: int) -> Simulation:
    return Simulation(model, loss_of, make_optimizer, workers=num_workers, topology="ring")


def loop_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    models = [copy.deepcopy(model) for _ in inputs]
    optimizers = [make_optimizer(own.parameters()) for own in models]

    def step() -> None:
        for own, optimizer, x, y in zip(models, optimizers, inputs, targets, strict=True):
            optimizer.zero_grad()
            loss_of(own(x), y).backward()
            optimizer.step()

    return step


def batch_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    own = copy.deepcopy(model)
    optimizer = make_optimizer(own.parameters())
    x, y = inputs.flatten(0, 1), targets.flatten(0, 1)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(own(x), y).backward()
        optimizer.step()

    return step


def pass_over(numbers: int) -> Callable[[], object]:
    """Return a function that reads and writes that many numbers: two passes."""
    memory = torch.ones(numbers)
    return lambda: memory.mul_(1.0)


def seconds_per_step(step: Callable[[], object]) -> float:
    step()  # not timed: caches and freed memory are still those of the previous method
    start = time.perf_counter()
    steps = 0
    while (elapsed := time.perf_counter() - start) < LEAST_S:
        step()
        steps += 1
    return elapsed / steps


def median_ratio(seconds: dict[str, list[float]], way: str, other: str) -> float:
    pairs = zip(seconds[way], seconds[other], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3)


def peak_memory(workload: Workload, num_workers: int) -> dict[str, float]:
    model = workload.build()
    inputs, targets = workload.sample(num_workers, workload.batch)
    small = make_simulation(model, 2)  # or libraries that torch loads at first use would count
    for _ in range(WARMUP):
        small.step(inputs[:2], targets[:2])
    before = peak_mb()
    sim = make_simulation(model, num_workers)
    for _ in range(WARMUP):
        sim.step(inputs, targets)
    stacked = sum(p.nbytes for p in sim.parameters.values()) / 1e6
    return {"peak_mb": round(peak_mb() - before, 1), "budget_mb": round(4 * stacked, 1)}


def peak_mb() -> float:
    # Not getrusage: its maximum starts from that of the process that this one was forked from.
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024 / 1e6


if __name__ == "__main__":
    typer.run(main)
