"""The cost of records: `python -m benchmarks.records`.

Interleaves runs that record norms and sketches at several intervals, the same with every norm
stored in a file, and one that records only its last step. One JSON line per number of workers and
interval: the extra time of a training step, what storing norms adds to a record, and the time to
write the parquet file at the end, without importing polars. Medians of CPU time. Set
OMP_NUM_THREADS=1, as the runner does for its runs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from gossamer.bench.norms import NormsPart
from gossamer.engine import RunSpec, run
from gossamer.records import Norms

_NORMS_MB = 50.0


class Spent(NamedTuple):
    """CPU seconds."""

    training: float
    """In steps and records, up to the last step."""

    finishing: float
    """The parquet file."""


def spent(workload: str, workers: int, steps: int, log_every: int, *, keep: bool) -> Spent:
    """Return the time of a run without its evaluation, with or without stored norms."""
    spec = RunSpec(
        workload=workload,
        workers=workers,
        topology="ring",
        algorithm="atc",
        epochs=1,
        steps_per_epoch=steps,
        log_every=log_every,
        evaluate_replicas=0,
    )
    records = run(spec, norms_mb=_NORMS_MB if keep else 0)
    next(records)  # the model is built and the data are read
    with tempfile.TemporaryDirectory() as folder:
        part = NormsPart(Path(folder) / "norms.part")
        began = time.process_time()
        for record in records:
            if isinstance(record, Norms):
                part.write(record)
            elif record.kind == "step" and record.step == steps:
                trained = time.process_time()
                part.finish(Path(folder) / "norms.parquet")
                return Spent(trained - began, time.process_time() - trained)
    raise AssertionError("a run has a record of its last step")


def main(
    workload: Annotated[str, typer.Option(help="The workload.")] = "digits-mlp",
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "8,64,256,1008",
    intervals: Annotated[str, typer.Option(help="Steps between records.")] = "1,10,25",
    steps: Annotated[int, typer.Option(help="Steps per run.")] = 100,
    rounds: Annotated[int, typer.Option(help="Runs of each kind, interleaved.")] = 5,
) -> None:
    """Measure the cost of records."""
    torch.set_num_threads(1)
    for count in map(int, workers.split(",")):
        every = [int(interval) for interval in intervals.split(",")]
        kinds = [
            (steps, False),
            *((interval, keep) for interval in every for keep in (False, True)),
        ]
        times: dict[tuple[int, bool], list[Spent]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for interval, keep in kinds:
                times[interval, keep].append(spent(workload, count, steps, interval, keep=keep))
        plain = [taken.training for taken in times[steps, False]]
        for interval in every:
            without = [taken.training for taken in times[interval, False]]
            kept = times[interval, True]
            ratio = statistics.median(a / b for a, b in zip(without, plain, strict=True))
            more = statistics.median(a.training - b for a, b in zip(kept, without, strict=True))
            row = {
                "workload": workload,
                "workers": count,
                "log_every": interval,
                "ms_per_step": 1e3 * statistics.median(plain) / steps,
                "cost_percent": 100 * (ratio - 1),
                "norms_ms_per_record": 1e3 * more / (steps // interval),
                "parquet_ms": 1e3 * statistics.median(taken.finishing for taken in kept),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    typer.run(main)
