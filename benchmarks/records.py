"""What records cost: `python -m benchmarks.records`.

Runs that record norms and sketches at several intervals, and one that does so in its last step
alone, take turns. One JSON line per number of workers and interval: how much longer a training step
takes, as a median. Set OMP_NUM_THREADS=1, as a runner does for each of its runs.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated

import torch
import typer

from gossamer.engine import RunSpec, run


def seconds(workload: str, workers: int, steps: int, log_every: int) -> float:
    """Return how long a run takes, without its evaluation."""
    spec = RunSpec(
        workload=workload,
        workers=workers,
        topology="ring",
        order="atc",
        epochs=1,
        steps_per_epoch=steps,
        log_every=log_every,
        evaluate_replicas=0,
    )
    records = run(spec)
    next(records)  # built, and the data read
    began = time.perf_counter()
    for record in records:
        if record.kind == "step" and record.step == steps:
            return time.perf_counter() - began
    raise AssertionError("a run has a record of its last step")


def main(
    workload: Annotated[str, typer.Option(help="What is trained.")] = "digits-mlp",
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "8,64,256,1008",
    intervals: Annotated[str, typer.Option(help="Steps between records.")] = "1,10,25",
    steps: Annotated[int, typer.Option(help="Steps per run.")] = 100,
    rounds: Annotated[int, typer.Option(help="Runs of each kind, taking turns.")] = 5,
) -> None:
    """Measure what it costs to record."""
    torch.set_num_threads(1)
    for count in map(int, workers.split(",")):
        every = [steps, *map(int, intervals.split(","))]
        times: dict[int, list[float]] = {interval: [] for interval in every}
        for _ in range(rounds):
            for interval in every:
                times[interval].append(seconds(workload, count, steps, interval))
        plain = times.pop(steps)
        for interval, taken in times.items():
            ratio = statistics.median(a / b for a, b in zip(taken, plain, strict=True))
            row = {
                "workload": workload,
                "workers": count,
                "log_every": interval,
                "ms_per_step": 1e3 * statistics.median(plain) / steps,
                "cost_percent": 100 * (ratio - 1),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    typer.run(main)
