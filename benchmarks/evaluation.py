"""The share of evaluations in the time of a run: `python -m benchmarks.evaluation`.

One JSON line per workload whose data are available (GOSSAMER_DATA), for a simulated run on a ring
with the defaults of its recipe: CPU seconds of a training step, of an evaluation during training
and of the last one, and ``share``, the share of all evaluations in the run. ``all_share`` is the
share if every evaluation used all test samples. Measured in four short epochs, the first of which
is warm-up, and extrapolated by the numbers of steps and evaluations. By default the workloads with
a run of at most about ten minutes.

CPU seconds of one thread: other jobs disturb them less than wall time.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated, Any

import torch
import typer

from gossamer.engine import RunSpec, run
from gossamer.errors import UserError
from gossamer.records import Evaluation, Step

WORKLOADS = (
    "quadratic",
    "digits-mlp",
    "digits-cnn",
    "stdlib-gpt",
    "fashion-mnist-cnn",
    "shakespeare-gpt",
)


def main(
    workload: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
    workers: Annotated[int, typer.Option()] = 16,
    topology: Annotated[str, typer.Option(help="A topology, or centralized.")] = "ring",
    steps: Annotated[int, typer.Option(help="In each of four epochs.")] = 25,
) -> None:
    """Print one JSON line per workload."""
    torch.set_num_threads(1)
    for name in workload or WORKLOADS:
        spec = RunSpec(workload=name, workers=workers, topology=topology)
        try:
            spec.make_workload().load()
        except UserError as error:
            print(json.dumps({"workload": name, "missing": str(error)}), flush=True)
            continue
        print(json.dumps(measure(spec, steps)), flush=True)


def measure(spec: RunSpec, steps: int) -> dict[str, Any]:
    """Return the time of steps and evaluations of a run, and the share of evaluations."""
    step_s, on_the_way_s, last_s = _seconds(spec, steps)
    evaluations = -(-spec.num_steps // (spec.steps_per_epoch * spec.evaluate_every))
    trained_s = step_s * spec.num_steps
    own_s = on_the_way_s * (evaluations - 1) + last_s
    all_s = last_s * evaluations
    return {
        "workload": spec.workload,
        "workers": spec.workers,
        "topology": spec.topology,
        "samples": spec.evaluate_samples or len(spec.make_workload().load().test_targets),
        "evaluations": evaluations,
        "run_s": round(trained_s + own_s, 2),
        "step_ms": round(1e3 * step_s, 3),
        "on_the_way_ms": round(1e3 * on_the_way_s, 2),
        "last_ms": round(1e3 * last_s, 2),
        "share": round(own_s / (trained_s + own_s), 4),
        "all_share": round(all_s / (trained_s + all_s), 4),
    }


def _seconds(spec: RunSpec, steps: int) -> tuple[float, float, float]:
    """Return CPU seconds of a step, of an evaluation during training, and of the last one.

    An epoch ends with a step record, so the time from it to the next record is the evaluation.
    """
    epochs = {"epochs": 4, "steps_per_epoch": steps, "log_every": steps, "warmup_epochs": 0.0}
    times: dict[str, list[float]] = {"step": [], "evaluation": []}
    began = time.process_time()
    for record in run(spec.model_copy(update=epochs)):
        if isinstance(record, Step | Evaluation) and record.epoch > 0:
            times[record.kind].append(time.process_time() - began)
        began = time.process_time()
    *on_the_way, last = times["evaluation"]
    return statistics.median(times["step"]) / steps, statistics.median(on_the_way), last


if __name__ == "__main__":
    typer.run(main)
