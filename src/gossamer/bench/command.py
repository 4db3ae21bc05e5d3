"""The verbs `gossamer bench …`: parse, make one library call, print."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
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
from rich.table import Table

from gossamer.bench.estimate import estimate_s
from gossamer.bench.experiment import Experiment, load, parse
from gossamer.bench.matrix import expand
from gossamer.bench.ranks import run_as_rank, under_torchrun
from gossamer.bench.report.command import report_command, watch_command
from gossamer.bench.runner import Listener, run_experiment
from gossamer.bench.store import Store
from gossamer.engine import RunSpec
from gossamer.errors import UserError
from gossamer.records import Ended, Evaluation, Step

bench_app = typer.Typer(no_args_is_help=True, help="Compare ways to train: DBench.")
_console = Console(highlight=False)

File = Annotated[Path, typer.Argument(help="The experiment, a TOML file.")]
Folder = Annotated[Path | None, typer.Option("--out", help="Where records are kept.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data sets lie; by default GOSSAMER_DATA.")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one per core.")]


@bench_app.command("expand")
def expand_command(
    file: File,
    data_dir: DataDir = None,
    jobs: Jobs = None,
    estimate: Annotated[bool, typer.Option(help="Measure a few steps of each kind of run.")] = True,
) -> None:
    """List the runs of an experiment, and about how long they take.

    For example: gossamer bench expand experiments/digits.toml
    """
    _use_data(data_dir)
    experiment = load(file)
    matrix = expand(experiment)
    table = Table(title=f"{experiment.name}: {len(matrix.runs)} runs")
    for heading in ("id", "workload", "workers", "method", "engine", "seed", "steps"):
        table.add_column(
            heading, justify="right" if heading in ("workers", "seed", "steps") else "left"
        )
    for spec in matrix.runs:
        cells = (spec.workers, spec.method, spec.engine, spec.seed, spec.num_steps)
        table.add_row(spec.id, spec.workload, *map(escape, map(str, cells)))
    _console.print(table)
    for skipped in matrix.skipped:
        fields = skipped.fields
        _console.print(
            f"skipped: {fields['method']} on {fields['workers']}: {escape(skipped.reason)}"
        )
    if estimate:
        cores = len(os.sched_getaffinity(0))
        _console.print(f"about {_lasting(estimate_s(matrix.runs, jobs or cores))}")


@bench_app.command("run")
def run_command(
    file: File,
    out: Folder = None,
    jobs: Jobs = None,
    retry: Annotated[bool, typer.Option(help="Run those again that failed.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Run an experiment, or what is left of it.

    For example: gossamer bench run experiments/digits.toml --jobs 2. Started again after any end,
    it goes on with the runs that are not done. Under torchrun it runs the distributed ones on the
    ranks that are there.
    """
    _use_data(data_dir)
    experiment = load(file)
    store = Store(out or default_folder(experiment))
    if under_torchrun():
        run_as_rank(experiment, store)
        return
    run_and_show(experiment, store, jobs=jobs, retry=retry)
    _print_status(experiment, store)


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for records and the report.")] = Path("demo"),
    jobs: Jobs = None,
) -> None:
    """Train digits in seven ways on 8 to 128 workers, say which wins, and write a report.

    For example: gossamer demo --out demo. About two minutes on two cores; started again after any
    end, it goes on.
    """
    text = resources.files("gossamer.bench").joinpath("demo.toml").read_text()
    experiment = parse(text, "demo.toml")
    run_and_show(experiment, Store(out), jobs=jobs)
    report_command(out)


@bench_app.command("status")
def status_command(folder: Annotated[Path, typer.Argument(help="Where records are kept.")]) -> None:
    """Say which runs of an experiment are done, and which failed, and why.

    For example: gossamer bench status results/digits
    """
    store = Store(folder)
    _print_status(load(store.experiment_path), store)


bench_app.command("report")(report_command)
bench_app.command("watch")(watch_command)


def default_folder(experiment: Experiment) -> Path:
    """Return where an experiment's records are kept unless a user says otherwise."""
    return Path("results") / experiment.name


def run_and_show(
    experiment: Experiment, store: Store, *, jobs: int | None = None, retry: bool = False
) -> None:
    """Run an experiment with bars on a terminal, and lines elsewhere."""
    if not sys.stderr.isatty():
        run_experiment(experiment, store, _Lines(), jobs=jobs, retry=retry)
        return
    with _Bars() as bars:
        run_experiment(experiment, store, bars, jobs=jobs, retry=retry)


class _Lines(Listener):
    """One line per run, for logs."""

    def __init__(self) -> None:
        self._count = self._total = 0
        self._metric: dict[str, float] = {}

    def planned(self, runs: Sequence[RunSpec], done: int) -> None:
        self._count, self._total = done, done + len(runs)
        _say(f"{self._total} runs, {done} of them done before")

    def started(self, spec: RunSpec) -> None:
        pass

    def advanced(self, spec: RunSpec, record: Step | Evaluation) -> None:
        if isinstance(record, Evaluation):
            self._metric[spec.id] = record.average

    def ended(self, spec: RunSpec, ended: Ended) -> None:
        self._count += 1
        _say(f"[{self._count}/{self._total}] {_result(spec, ended, self._metric.get(spec.id))}")


class _Bars(Listener):
    """A bar for all runs and one for each that goes on."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False),
        )
        self._all = TaskID(0)
        self._bars: dict[str, TaskID] = {}
        self._metric: dict[str, float] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def planned(self, runs: Sequence[RunSpec], done: int) -> None:
        self._all = self._progress.add_task(
            "[bold]all runs", total=done + len(runs), completed=done
        )

    def started(self, spec: RunSpec) -> None:
        self._bars[spec.id] = self._progress.add_task(escape(title(spec)), total=spec.num_steps)

    def advanced(self, spec: RunSpec, record: Step | Evaluation) -> None:
        self._progress.update(self._bars[spec.id], completed=record.step)
        if isinstance(record, Evaluation):
            self._metric[spec.id] = record.average

    def ended(self, spec: RunSpec, ended: Ended) -> None:
        self._progress.remove_task(self._bars.pop(spec.id))
        self._progress.advance(self._all)
        self._progress.print(escape(_result(spec, ended, self._metric.get(spec.id))))


def title(spec: RunSpec) -> str:
    """Return what a user calls a run."""
    return (
        f"{spec.workload} {spec.method or spec.topology}, {spec.workers} workers, seed {spec.seed}"
    )


def _result(spec: RunSpec, ended: Ended, metric: float | None) -> str:
    name = spec.make_workload().metric_name
    score = "" if metric is None else f", {name} {metric:.4g}"
    why = f": {ended.reason.strip().splitlines()[-1]}" if ended.reason else ""
    return f"{title(spec)}: {ended.status}{score}, {ended.train_s:.1f} s{why}"


def _print_status(experiment: Experiment, store: Store) -> None:
    matrix = expand(experiment)
    ends = {spec.id: store.ended(spec.id) for spec in matrix.runs}
    counts = Counter(ended.status if ended else "to do" for ended in ends.values())
    counts["skipped"] = len(matrix.skipped)
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    _console.print(f"{experiment.name}: {', '.join(parts)}; records in {store.folder}")
    for spec in matrix.runs:
        ended = ends[spec.id]
        if ended is not None and ended.status != "done":
            _console.print(escape(_result(spec, ended, None)))
    if counts["error"] or counts["timeout"]:
        _console.print("run it with --retry to try those again")


def _use_data(folder: Path | None) -> None:
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"--data-dir must be a folder, got {folder}; make it first")
        os.environ["GOSSAMER_DATA"] = str(folder.absolute())  # child processes read it too


def _lasting(seconds: float) -> str:
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds > 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
