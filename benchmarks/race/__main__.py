"""Race training methods on slow links to one loss: `python -m benchmarks.race --rate 300mbit`."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cluster.run import console, environment, start
from benchmarks.race.methods import METHODS
from benchmarks.race.report import Point, draw, table
from benchmarks.race.worker import POINT, Task
from gossamer.errors import UserError
from gossamer.lab import Cluster, HostFailed, one_switch


def main(  # noqa: PLR0913 - one parameter per option
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    rate: Annotated[list[str] | None, typer.Option(help="Rate of the links; repeatable.")] = None,
    workload: Annotated[str, typer.Option(help="A transformer among the workloads.")] = (
        "stdlib-gpt"
    ),
    steps: Annotated[int, typer.Option(help="Of DDP; its loss then is what others race to.")] = 200,
    stretch: Annotated[float, typer.Option(help="Steps of all, in those of DDP.")] = 1.5,
    evaluate_every: Annotated[int, typer.Option(help="Steps from point to point.")] = 10,
    batch: Annotated[int, typer.Option(help="Samples per host and step.")] = 4,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 2e-3,
    compute_ms: Annotated[float, typer.Option(help="Emulated compute per step.")] = 100.0,
    seed: Annotated[int, typer.Option(help="Of model and samples.")] = 0,
    method: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON lines.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write curves: .html, .png or .svg.")] = None,
) -> None:
    """Train by each method, and say when it has the loss that DDP has at its end."""
    task = Task(
        methods=_methods(method or list(METHODS)),
        workload=workload,
        steps=round(steps * stretch),
        evaluate_every=evaluate_every,
        batch=batch,
        lr=lr,
        compute_ms=compute_ms,
        seed=seed,
        timeout_s=1800.0,
    )
    points: list[Point] = []
    for each in rate or ["300mbit", "100mbit"]:
        points += _race(task, hosts, each)
    if json_file is not None:
        lines = [{"kind": "run", **environment(), **asdict(task)}]
        lines += [{"kind": "point", **point._asdict()} for point in points]
        json_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    console.print(table(points, steps))
    if page is not None:
        draw(points, page)


def _methods(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise UserError(f"a method must be one of {', '.join(METHODS)}, got {unknown[0]!r}")
    if importlib.util.find_spec("decent_dp") is None:
        names = [name for name in names if not name.startswith("decent_dp")]
        console.print("without decent_dp: pip install 'gossamer[peers]'", markup=False)
    return names


def _race(task: Task, hosts: int, rate: str) -> list[Point]:
    points: list[Point] = []

    def collect(host: str, line: str) -> None:
        if not line.startswith(POINT):
            console.print(f"[{host}] {line}", markup=False)
            return
        found = Point(rate, **json.loads(line.removeprefix(POINT)))
        points.append(found)
        if found.step == task.steps:
            console.print(f"{rate} {found.method}: {found.loss:.3f} in {found.seconds:.1f} s")

    command = [sys.executable, "-m", "benchmarks.race.worker", task.to_json()]
    with Cluster(one_switch(hosts, rate)) as cluster:
        try:
            cluster.run(command, environment={"OMP_NUM_THREADS": "1"}, sink=collect)
        except HostFailed as error:
            console.print(str(error), markup=False)
    return points


if __name__ == "__main__":
    start(main)
