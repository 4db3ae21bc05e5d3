"""Race training methods on slow links to one loss: `python -m benchmarks.race --rate 300mbit`."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cluster.run import console, environment, start
from benchmarks.race.methods import METHODS, REFERENCE
from benchmarks.race.report import Point, curves_at, draw, draw_bars, table, times_to_end
from benchmarks.race.run import run_on_hosts
from benchmarks.race.worker import Task
from gossamer.errors import UserError

_NOT_SETTING = ("methods", "target", "lrs")


def main(  # noqa: PLR0913 - one parameter per option
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    rate: Annotated[list[str] | None, typer.Option(help="Rate of the links; repeatable.")] = None,
    workload: Annotated[str, typer.Option(help="A transformer among the workloads.")] = (
        "stdlib-gpt"
    ),
    width: Annotated[
        int, typer.Option(help="Width of a 2-layer model; 0 for the workload's.")
    ] = 128,
    steps: Annotated[int, typer.Option(help="Steps of DDP; its final loss is the target.")] = 200,
    stretch: Annotated[float, typer.Option(help="Steps of others, relative to DDP's.")] = 1.5,
    evaluate_every: Annotated[int, typer.Option(help="Steps between two evaluations.")] = 20,
    batch: Annotated[int, typer.Option(help="Samples per host and step.")] = 4,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 2e-3,
    compute_ms: Annotated[float, typer.Option(help="Emulated compute per step.")] = 100.0,
    seed: Annotated[int, typer.Option(help="Of model and samples.")] = 0,
    method: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="JSON lines; methods that it contains are not run again."),
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write curves: .html, .png or .svg.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Write bars of times to the loss.")] = None,
) -> None:
    """Train with each method, and print when it reaches DDP's final loss."""
    task = Task(
        methods=_methods(method or list(METHODS)),
        workload=workload,
        width=width,
        steps=steps,
        most_steps=round(steps * stretch),
        target=None,
        evaluate_every=evaluate_every,
        batch=batch,
        lr=lr,
        compute_ms=compute_ms,
        seed=seed,
        timeout_s=900.0,
    )
    results = Results(task, json_file)
    for each in rate or ["300mbit", "100mbit"]:
        task = results.left_of(each)
        if task.methods:
            run_on_hosts(task, hosts, each, results.add, partial(results.end, each))
    points = results.of_ended()
    console.print(table(points))
    if page is not None:
        draw(points, page)
    if figure is not None:
        rates = dict.fromkeys(point.rate for point in points)
        draw_bars({rate: _seconds(points, rate) for rate in rates}, figure)


class Results:
    """Points of methods, written to a file as they arrive.

    Args:
        task: what is run; an existing file must be of the same task.
        path: of the file; None for memory only.
    """

    def __init__(self, task: Task, path: Path | None) -> None:
        self._points: list[Point] = []
        self._task = task
        self._path = path
        self._ended: set[tuple[str, str]] = set()
        setting = {k: v for k, v in asdict(task).items() if k not in _NOT_SETTING}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        found = [json.loads(line) for line in lines]
        if found and found[0]["setting"] != setting:
            raise UserError(
                f"{path} must hold results of the same setting, got {found[0]['setting']} where "
                f"this is {setting}; name another file"
            )
        for line in found[1:]:
            fields = {k: v for k, v in line.items() if k != "kind"}
            if line["kind"] == "end":
                self._ended.add((line["rate"], line["method"]))
            else:
                self._points.append(Point(**fields))
        self._points = self.of_ended()
        if not found:
            self._write({"kind": "run", **environment(), "setting": setting})

    def of_ended(self) -> list[Point]:
        """Return the points of methods that have finished."""
        return [
            point
            for method in METHODS
            for point in self._points
            if point.method == method and (point.rate, method) in self._ended
        ]

    def left_of(self, rate: str) -> Task:
        """Return the task with the methods that have not finished at a rate."""
        left = [name for name in self._task.methods if (rate, name) not in self._ended]
        losses = [p.loss for p in self._points if (p.rate, p.method) == (rate, REFERENCE)]
        return replace(self._task, methods=left, target=losses[-1] if losses else None)

    def add(self, point: Point) -> None:
        """Add a point."""
        self._points.append(point)
        self._write({"kind": "point", **point._asdict()})

    def end(self, rate: str, method: str) -> None:
        """Record that a method has finished."""
        self._ended.add((rate, method))
        self._write({"kind": "end", "rate": rate, "method": method})
        last = [p for p in self._points if (p.rate, p.method) == (rate, method)][-1]
        console.print(
            f"{rate} {method}: {last.loss:.3f} in {last.step} steps, {last.seconds:.1f} s"
        )

    def _write(self, line: dict[str, object]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _seconds(points: list[Point], rate: str) -> dict[str, list[float]]:
    times = times_to_end(points, rate)
    return {method: [times.get(method, math.inf)] for method in curves_at(points, rate)}


def _methods(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise UserError(f"a method must be one of {', '.join(METHODS)}, got {unknown[0]!r}")
    if importlib.util.find_spec("decent_dp") is None:
        names = [name for name in names if not name.startswith("decent_dp")]
        console.print("without decent_dp: pip install 'gossamer[peers]'", markup=False)
    return names


if __name__ == "__main__":
    start(main)
