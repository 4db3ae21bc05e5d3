"""The race over several seeds, each method at its best rate: `python -m benchmarks.race.seeds`.

How long a step takes does not change what it does to the loss. So each method is trained here once
per seed on fast links and without emulated compute, and the milliseconds of its steps on slow links
are those that `python -m benchmarks.race --json` measured: seconds to a loss are steps to it times
milliseconds per step. Learning rates are tuned first, on a seed of their own, the same ones for
every method.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from benchmarks.cluster.run import console, environment, start
from benchmarks.race.methods import METHODS, REFERENCE
from benchmarks.race.report import Point, draw_bars, seconds_to
from benchmarks.race.run import run_on_hosts
from benchmarks.race.worker import Task
from gossamer.errors import UserError

_FAST = "10gbit"
_TUNING_SEED = 1000


class Curve(NamedTuple):
    """The loss of one method on its way, at one learning rate and seed."""

    method: str
    lr: float
    seed: int
    losses: list[tuple[int, float]]
    """Step and loss of each evaluation."""

    @property
    def key(self) -> tuple[str, float, int]:
        """Which run it is of."""
        return self.method, self.lr, self.seed

    def steps_to(self, loss: float) -> float:
        """Return the steps until it first has a loss, interpolated; infinite where it never has."""
        points = [Point("", "", step, step, found) for step, found in self.losses]
        steps = seconds_to(points, loss)
        return math.inf if steps is None else steps


class Curves:
    """Curves that have been trained, in a file that gets a line for each.

    Args:
        path: of the file; what it holds is not trained again.
        setting: what all curves have in common; a file must be of the same.
    """

    def __init__(self, path: Path, setting: Mapping[str, Any]) -> None:
        self._path = path
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        if lines and lines[0]["setting"] != setting:
            raise UserError(
                f"{path} must hold curves of the setting {setting}, got {lines[0]['setting']}; "
                "name another file with --json"
            )
        if not lines:
            self._write({"kind": "run", **environment(), "setting": setting})
        self._curves = [Curve(**line["curve"]) for line in lines[1:]]

    def train(self, task: Task, hosts: int) -> None:
        """Train a task's methods, those without a curve of this task's seed and rates."""
        done = {curve.key for curve in self._curves}
        left = [m for m in task.methods if (m, task.lr_of(m), task.seed) not in done]
        if not left:
            return
        if task.target is None and REFERENCE not in left:
            (reference,) = self.of(REFERENCE, task.lr_of(REFERENCE), [task.seed])
            task = replace(task, target=reference.losses[-1][1])
        losses: dict[str, list[tuple[int, float]]] = {}

        def add(point: Point) -> None:
            losses.setdefault(point.method, []).append((point.step, point.loss))

        def end(method: str) -> None:
            curve = Curve(method, task.lr_of(method), task.seed, losses.pop(method))
            self._curves.append(curve)
            self._write({"kind": "curve", "curve": curve._asdict()})
            step, loss = curve.losses[-1]
            console.print(f"seed {curve.seed} {method} at {curve.lr:g}: {loss:.3f} in {step} steps")

        run_on_hosts(replace(task, methods=left), hosts, _FAST, add, end)

    def tuned(self, method: str) -> float:
        """Return the learning rate of a method's lowest loss, among those that were tried."""
        tried = [c for c in self._curves if c.method == method and c.seed == _TUNING_SEED]
        finite = [curve for curve in tried if math.isfinite(curve.losses[-1][1])]
        if not finite:
            raise UserError(
                f"{method} must have a finite loss at one of the rates, got none of "
                f"{len(tried)}; give lower ones by --lr, or run it again if it timed out"
            )
        best = min(finite, key=lambda curve: curve.losses[-1][1]).lr
        if best in (min(c.lr for c in tried), max(c.lr for c in tried)):
            console.print(f"{method} is best at {best:g}, an end of the rates; give more by --lr")
        return best

    def of(self, method: str, lr: float, seeds: Iterable[int]) -> list[Curve]:
        """Return a method's curves, one per seed."""
        found = {curve.key: curve for curve in self._curves}
        missing = [seed for seed in seeds if (method, lr, seed) not in found]
        if missing:
            raise UserError(
                f"{method} at {lr:g} must have been trained with every seed, got none of seed "
                f"{missing[0]}; run it again to train what is missing"
            )
        return [found[method, lr, seed] for seed in seeds]

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(
    times: Annotated[
        Path, typer.Option(help="Of benchmarks.race --json: milliseconds per step.")
    ] = Path("evidence/race.jsonl"),
    json_file: Annotated[
        Path, typer.Option("--json", help="Curves, as they come; what it has is not run again.")
    ] = Path("evidence/race-seeds.jsonl"),
    lr: Annotated[list[float] | None, typer.Option(help="A learning rate to try.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds that are compared.")] = 5,
    stretch: Annotated[float, typer.Option(help="Steps of others, in those of DDP.")] = 2.5,
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    method: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Write bars of times to the loss.")] = None,
) -> None:
    """Say how long each method takes to the loss of DDP, over several seeds."""
    timed = [json.loads(line) for line in times.read_text().splitlines()]
    setting = {k: v for k, v in timed[0]["setting"].items() if k not in ("seed", "lr")}
    setting |= {"compute_ms": 0.0, "most_steps": round(setting["steps"] * stretch)}
    names = [REFERENCE, *(name for name in method or METHODS if name != REFERENCE)]
    ms = _ms_per_step([line for line in timed if line["kind"] == "point"])
    untimed = [name for name in names for of_rate in ms.values() if name not in of_rate]
    if untimed:
        raise UserError(
            f"every method must have times in {times}, got none of {untimed[0]!r}; take them by "
            f"python -m benchmarks.race --json {times} --method {untimed[0]!r}"
        )
    task = Task(methods=names, target=None, seed=_TUNING_SEED, lr=0.0, **setting)
    curves = Curves(json_file, setting)
    # - Learning rates, by the loss after as many steps as DDP takes
    for rate in lr or [2.5e-4, 5e-4, 1e-3, 2e-3]:
        curves.train(replace(task, lr=rate, most_steps=task.steps, target=-math.inf), hosts)
    best = {name: curves.tuned(name) for name in names}
    # - Seeds
    for seed in range(seeds):
        curves.train(replace(task, seed=seed, lrs=best), hosts)
    targets = [c.losses[-1][1] for c in curves.of(REFERENCE, best[REFERENCE], range(seeds))]
    steps = {
        name: [c.steps_to(loss) for c, loss in zip(found, targets, strict=True)]
        for name in names
        for found in [curves.of(name, best[name], range(seeds))]
    }
    console.print(_table(best, steps, ms))
    if figure is not None:
        seconds = {
            rate: {name: [n * each[name] / 1e3 for n in steps[name]] for name in names}
            for rate, each in ms.items()
        }
        draw_bars(seconds, figure)


def _ms_per_step(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step by link rate and method."""
    ms: dict[str, dict[str, float]] = {}
    for point in points:
        if point["step"]:
            ms.setdefault(point["rate"], {})[point["method"]] = (
                1e3 * point["seconds"] / point["step"]
            )
    return ms


def _table(
    best: Mapping[str, float],
    steps: Mapping[str, Sequence[float]],
    ms: Mapping[str, Mapping[str, float]],
) -> Table:
    """Return a row per method; times are medians over seeds, in those of DDP."""
    columns = [f"{rate}: {what}" for rate in ms for what in ("ms/step", "s", "of DDP")]
    shown = Table("method", "lr", "steps to DDP's loss", "seeds", *columns)
    for name, each in steps.items():
        median = statistics.median(each)
        cells = [f"{best[name]:g}", f"{median:.0f} ({min(each):.0f} to {max(each):.0f})"]
        cells.append(f"{sum(map(math.isfinite, each))} of {len(each)}")
        for of_rate in ms.values():
            seconds = median * of_rate[name] / 1e3
            of_ddp = seconds / (statistics.median(steps[REFERENCE]) * of_rate[REFERENCE] / 1e3)
            cells += [f"{of_rate[name]:.0f}", f"{seconds:.1f}", f"{of_ddp:.2f}"]
        shown.add_row(name, *cells)
    return shown


if __name__ == "__main__":
    start(main)
