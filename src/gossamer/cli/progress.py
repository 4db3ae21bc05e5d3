"""The progress of an experiment: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, final

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from gossamer.bench.experiment import Experiment
from gossamer.bench.planned import PlannedRun
from gossamer.bench.runner import run_experiment
from gossamer.bench.store import Store
from gossamer.cli.terminal import say
from gossamer.engine import RunSpec
from gossamer.records import Ended
from gossamer.registry import shorten


def run_and_show(experiment: Experiment, store: Store, **options: Any) -> None:
    """Run an experiment with bars on a terminal, and lines elsewhere; options as the runner's."""
    if not sys.stderr.isatty():
        run_experiment(experiment, store, Lines(), **options)
        return
    with _Bars() as bars:
        run_experiment(experiment, store, bars, **options)


def title(spec: RunSpec | PlannedRun) -> str:
    """Return the title of a run: workload, method, workers, seed."""
    name = spec.method or shorten(spec.topology)
    workers = "ranks" if spec.engine == "distributed" else "workers"
    trial = f", trial of lr {spec.lr:g}" if spec.validation_share else ""
    return f"{shorten(spec.workload)} {name}, {spec.workers} {workers}, seed {spec.seed}{trial}"


def result(spec: RunSpec | PlannedRun, ended: Ended, score: str = "") -> str:
    """Return in one line how a run ended."""
    why = f": {ended.reason.strip().splitlines()[-1]}" if ended.reason else ""
    return f"{title(spec)}: {ended.status}{score}, {ended.train_s:.1f} s{why}"


def _score(spec: RunSpec, metric: float | None) -> str:
    return "" if metric is None else f", {spec.make_workload().metric_name} {metric:.4g}"


@final
class Lines:
    """One line per run, for logs."""

    def __init__(self) -> None:
        self._count = self._total = 0

    def planned(self, runs: Sequence[RunSpec], done: int) -> None:
        """Say how many runs there are."""
        self._count, self._total = done, done + len(runs)
        say(f"{self._total} runs, {done} of them done before")

    def started(self, spec: RunSpec) -> None:
        """Say nothing."""

    def advanced(self, spec: RunSpec, step: int) -> None:
        """Say nothing."""

    def ended(self, spec: RunSpec, ended: Ended, metric: float | None) -> None:
        """Say how a run ended, and how many have."""
        self._count += 1
        say(f"[{self._count}/{self._total}] {result(spec, ended, _score(spec, metric))}")


@final
class _Bars:
    """A bar for all runs, and one for each that is running."""

    def __init__(self) -> None:
        self._progress = Progress(
            # On a narrow terminal the description wraps to a second line, and is not truncated.
            TextColumn("{task.description}", table_column=Column(overflow="fold")),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False, emoji=False),
        )
        self._all: TaskID | None = None
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def planned(self, runs: Sequence[RunSpec], done: int) -> None:
        if self._all is None:
            self._all = self._progress.add_task("[bold]all runs")
        self._progress.update(self._all, total=done + len(runs), completed=done)

    def started(self, spec: RunSpec) -> None:
        self._bars[spec.id] = self._progress.add_task(escape(title(spec)), total=spec.num_steps)

    def advanced(self, spec: RunSpec, step: int) -> None:
        self._progress.update(self._bars[spec.id], completed=step)

    def ended(self, spec: RunSpec, ended: Ended, metric: float | None) -> None:
        self._progress.remove_task(self._bars.pop(spec.id))
        if self._all is not None:
            self._progress.advance(self._all)
        self._progress.print(escape(result(spec, ended, _score(spec, metric))))
