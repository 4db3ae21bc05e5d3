"""Throughput of workloads, and a check that they learn.

    python -m benchmarks.workloads [--workload digits-cnn] [--workers 16] [--batch 8] [--rounds 3]
    python -m benchmarks.workloads --train --workload cifar10-resnet20 [--steps 50] [--no-evaluate]

One JSON line per workload whose data are available (GOSSAMER_DATA). Without ``--train``, samples
per second of two methods on the same samples, interleaved in one process, medians over rounds:

- ``simulation``: gossamer.Simulation of all workers on a ring, awc; complete steps.
- ``batch``: one model on one batch of all workers' samples.

Both with fetching, augmentation and the recipe's optimizer. ``of_batch`` is the simulation's
samples/s over those of the batch, median of the rounds' ratios. With ``--train``, one epoch (or so
many steps) of a run on a ring, of which 20 steps are logged: mean loss of the first and of the last
two of them, the metric of the average model at the end, and samples per second of training.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

from benchmarks.simulation import WARMUP
from gossamer import Simulation, workloads
from gossamer.engine import RunSpec, run
from gossamer.engine.batches import Batches
from gossamer.errors import UserError
from gossamer.records import Evaluation, Step


def main(
    workload: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
    workers: Annotated[int, typer.Option()] = 16,
    batch: Annotated[int, typer.Option(help="Per worker; 0: the recipe's.")] = 0,
    rounds: Annotated[int, typer.Option(help="Rounds; each does a step of both.")] = 5,
    train: Annotated[bool, typer.Option("--train", help="Train instead.")] = False,
    steps: Annotated[int, typer.Option(help="To train; 0: one epoch.")] = 0,
    evaluate: Annotated[bool, typer.Option(help="At the end of training.")] = True,
) -> None:
    """Print one JSON line per workload."""
    for name in workload or workloads.WORKLOADS:
        fields: dict[str, Any] = {"workload": name, "workers": workers, "topology": "ring"}
        fields |= {"batch_size": batch} if batch else {}
        fields |= {"steps_per_epoch": steps} if steps else {}
        spec = RunSpec(**fields, epochs=1, evaluate_replicas=0, warmup_epochs=0)
        spec = spec.model_copy(update={"log_every": max(1, spec.steps_per_epoch // 20)})
        try:
            spec.make_workload().load()
        except UserError as error:
            print(json.dumps({"workload": name, "missing": str(error)}), flush=True)
            continue
        line = learn(spec, evaluate) if train else measure(spec, rounds)
        print(json.dumps(line), flush=True)


def measure(spec: RunSpec, rounds: int) -> dict[str, Any]:
    """Return the throughput of both methods."""
    seconds: dict[str, list[float]] = {"simulation": [], "batch": []}
    ways = {"simulation": simulation_step(spec), "batch": batch_step(spec)}
    for i in range(WARMUP + rounds):
        for way, step in ways.items():
            began = time.perf_counter()
            if way == "simulation" or i >= WARMUP - 1:
                step(i)
            if i >= WARMUP:
                seconds[way].append(time.perf_counter() - began)
    num = spec.workers * spec.batch_size
    rates = {f"{way}_samples_per_s": num / statistics.median(seconds[way]) for way in seconds}
    pairs = zip(seconds["batch"], seconds["simulation"], strict=True)
    return _sizes(spec) | {
        **{way: round(rate, 1) for way, rate in rates.items()},
        "of_batch": round(statistics.median(batch / own for batch, own in pairs), 3),
    }


def simulation_step(spec: RunSpec) -> Callable[[int], object]:
    batches = Batches(spec, range(spec.workers))
    loss = spec.make_workload().loss
    sim = Simulation(spec.make_model(), loss, spec.make_optimizer, spec.workers, spec.topology)
    samples = batches.draw(0)

    def step(i: int) -> object:
        return sim.step(*batches.fetch(samples[:, i % spec.steps_per_epoch], i))

    return step


def batch_step(spec: RunSpec) -> Callable[[int], object]:
    batches = Batches(spec, range(spec.workers))
    model, loss = spec.make_model().train(), spec.make_workload().loss
    optimizer = spec.make_optimizer(model.parameters())
    samples = batches.draw(0)

    def step(i: int) -> None:
        inputs, targets = batches.fetch(samples[:, i % spec.steps_per_epoch], i)
        optimizer.zero_grad()
        loss(model(inputs.flatten(0, 1)), targets.flatten(0, 1)).backward()
        optimizer.step()

    return step


def learn(spec: RunSpec, evaluate: bool) -> dict[str, Any]:
    """Train, report progress on stderr, and return the results."""
    steps: list[Step] = []
    metric: dict[str, float] = {}
    for record in run(spec):
        if isinstance(record, Step):
            print(f"step {record.step}: loss {record.loss:.4f}", file=sys.stderr, flush=True)
            steps.append(record)
            if record.step == spec.num_steps and not evaluate:
                break
        if isinstance(record, Evaluation):
            metric = {spec.make_workload().metric_name: round(record.average, 4)}
    samples = spec.workers * spec.batch_size * spec.num_steps
    return _sizes(spec) | {
        "lr": spec.lr,
        "steps": spec.num_steps,
        "first_loss": round(statistics.mean(step.loss for step in steps[:2]), 4),
        "last_loss": round(statistics.mean(step.loss for step in steps[-2:]), 4),
        **metric,
        "train_s": round(steps[-1].train_s, 1),
        "samples_per_s": round(samples / steps[-1].train_s, 1),
    }


def _sizes(spec: RunSpec) -> dict[str, Any]:
    model = spec.make_model()
    return {
        "workload": spec.workload,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "workers": spec.workers,
        "batch": spec.batch_size,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    typer.run(main)
