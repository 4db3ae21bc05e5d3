"""The verbs `gossamer bench …` and `gossamer demo`: parse, make one library call, print.

What trains is imported when a verb runs: torch takes seconds, and --help needs none of it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gossamer.bench.report.command import check_installed, report_command, watch_command
from gossamer.errors import UserError

if TYPE_CHECKING:
    from gossamer.bench import Experiment, Store

bench_app = typer.Typer(no_args_is_help=True, help="Compare ways to train: DBench.")
_console = Console(highlight=False, soft_wrap=True)

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

    For example: gossamer bench expand experiments/digits-1008.toml
    """
    from gossamer.bench import expand, load
    from gossamer.bench.estimate import estimate_s
    from gossamer.bench.runner import count_cores

    _use_data(data_dir)
    experiment = load(file)
    matrix = expand(experiment)
    table = Table(title=f"{experiment.name}: {len(matrix.runs)} runs")
    for heading in ("id", "workload", "workers", "method", "engine", "seed", "steps"):
        numeric = heading in ("workers", "seed", "steps")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=heading == "id")
    for spec in matrix.runs:
        cells = (spec.workers, spec.method, spec.engine, spec.seed, spec.num_steps)
        table.add_row(spec.id, spec.workload, *map(escape, map(str, cells)))
    _console.print(table)
    for skipped in matrix.skipped:
        _console.print(f"skipped: {escape(skipped.reason)}")
    if estimate:
        print("measuring a few steps of each kind of run", file=sys.stderr, flush=True)
        seconds = estimate_s(matrix.runs, jobs or count_cores())
        _console.print(f"about {_lasting(seconds)} on this machine as it is now")


@bench_app.command("run")
def run_command(
    file: File,
    out: Folder = None,
    jobs: Jobs = None,
    retry: Annotated[bool, typer.Option(help="Run those again that failed.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Run an experiment, or what is left of it.

    For example: gossamer bench run experiments/digits-1008.toml --jobs 2. Started again after any
    end, it goes on with the runs that are not done. Under torchrun it runs the distributed ones on
    the ranks that are there. The exit code is 1 where a run failed.
    """
    from gossamer.bench import Store, load
    from gossamer.bench.ranks import run_as_rank, under_torchrun

    _use_data(data_dir)
    experiment = load(file)
    store = Store(out or Path("results") / experiment.name)
    if under_torchrun():
        run_as_rank(experiment, store, retry=retry)
        return
    _run(experiment, store, jobs=jobs, retry=retry)
    _print_status(experiment, store)
    _exit_where_failed(experiment, store)


@bench_app.command("status")
def status_command(folder: Annotated[Path, typer.Argument(help="Where records are kept.")]) -> None:
    """Say which runs of an experiment are done, and which failed, and why.

    For example: gossamer bench status results/digits-1008
    """
    from gossamer.bench import Store, load

    store = Store(folder)
    _print_status(load(store.experiment_path), store)


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for records and the report.")] = Path("demo"),
    jobs: Jobs = None,
) -> None:
    """Train digits in seven ways on 8 to 128 workers, say which wins, and write a report.

    For example: gossamer demo --out demo. About two minutes on two cores; started again after any
    end, it goes on.
    """
    from gossamer.bench import Store
    from gossamer.bench.experiment import parse

    check_installed()  # not after two minutes
    text = resources.files("gossamer.bench").joinpath("demo.toml").read_text()
    experiment, store = parse(text, "demo.toml"), Store(out)
    _run(experiment, store, jobs=jobs)
    report_command(out)
    _exit_where_failed(experiment, store)


def data_command(
    name: Annotated[str, typer.Argument(help="A data set, or a workload that uses it.")],
    data_dir: DataDir = None,
) -> None:
    """Download a data set from where it is published, and check it.

    For example: gossamer data cifar10 --data-dir ~/data
    """
    from gossamer.workloads.files import data_folder
    from gossamer.workloads.sources import download

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for path in download(name, (data_dir or data_folder()).expanduser(), report=console.print):
        console.print(f"{path} is there")


bench_app.command("report")(report_command)
bench_app.command("watch")(watch_command)


def _run(experiment: Experiment, store: Store, **options: Any) -> None:
    from gossamer.bench.progress import run_and_show

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run_and_show(experiment, store, **options)
    except KeyboardInterrupt:
        print("interrupted; start it again to go on", file=sys.stderr)
        sys.exit(130)


def _interrupt(signum: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _print_status(experiment: Experiment, store: Store) -> None:
    from gossamer.bench import expand
    from gossamer.bench.progress import result

    matrix = expand(experiment)
    ends = {spec.id: store.ended(spec.id) for spec in matrix.runs}
    there = store.run_ids()
    counts = Counter(
        ended.status if ended else "cut off or going on" if run_id in there else "to do"
        for run_id, ended in ends.items()
    )
    counts["skipped"] = len(matrix.skipped)
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    _console.print(f"{experiment.name}: {', '.join(parts)}; records in {store.folder}")
    for spec in matrix.runs:
        ended = ends[spec.id]
        if ended is not None and ended.status != "done":
            _console.print(escape(result(spec, ended)))
        elif ended is None and spec.id in there and (damage := store.read(spec.id).damage):
            _console.print(escape(f"{damage}; it will be run again"))
    if counts["error"] or counts["timeout"]:
        _console.print("run it with --retry to try those again")


def _exit_where_failed(experiment: Experiment, store: Store) -> None:
    from gossamer.bench import expand

    ends = [store.ended(spec.id) for spec in expand(experiment).runs]
    if any(ended is None or ended.status in ("error", "timeout") for ended in ends):
        sys.exit(1)


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
