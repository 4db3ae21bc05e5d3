"""The verbs `gossamer bench …` and `gossamer demo`."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.markup import escape
from rich.table import Table

from gossamer.cli.data import DataDir
from gossamer.cli.flags import Group, Verb
from gossamer.cli.names import complete_experiment
from gossamer.cli.report import Folder, check_installed, report_command, watch_command
from gossamer.cli.terminal import Json, say, show, show_json, track
from gossamer.errors import UserError

if TYPE_CHECKING:
    from gossamer.bench import Experiment, Matrix, Store
    from gossamer.bench.planned import PlannedRun, PlannedRuns
    from gossamer.engine import RunSpec

bench_app = typer.Typer(cls=Group, no_args_is_help=True)

File = Annotated[
    Path,
    typer.Argument(help="The experiment, a TOML file.", autocompletion=complete_experiment),
]
Out = Annotated[Path | None, typer.Option(help="Folder of records.", show_default="results/NAME")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Concurrent runs; by default one per core.")]


@bench_app.callback()
def describe() -> None:
    """Compare ways to train: DBench.

    An experiment is a TOML file; docs/dbench.md describes it.

    Examples:
    $ gossamer bench expand experiments/digits-1008.toml
    $ gossamer bench run experiments/digits-1008.toml
    $ gossamer bench report results/digits-1008
    """


@bench_app.command("expand", cls=Verb)
def expand_command(
    file: File,
    out: Out = None,
    data_dir: DataDir = None,
    jobs: Jobs = None,
    estimate: Annotated[
        bool | None,
        typer.Option(
            "--estimate/--no-estimate",
            help="Measure a few steps, for at most half a minute.",
            show_default="from records",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the runs of an experiment, and estimate their time.

    The estimate uses records of runs of the same kind;
    --estimate measures a few steps of the others. Where
    learning rates are tuned, the runs listed are those that
    follow from the trials in --out.

    Examples:
    $ gossamer bench expand experiments/digits-1008.toml
    $ gossamer bench expand mine.toml --estimate --json
    """
    from gossamer.bench import Store, expand, load
    from gossamer.bench.trials import Trials
    from gossamer.cli.studies import show_studies

    _use_data(data_dir)
    experiment = load(file)
    store = Store(out or Path("results") / experiment.name)
    matrix = expand(experiment, Trials(store).outcomes())
    if as_json:
        for spec in matrix.runs:
            show_json("run", _facts(spec))
        _print_rest_json(matrix)
    else:
        show(_runs_table(experiment.name, matrix.runs))
        for skipped in matrix.skipped:
            show(f"skipped: {escape(skipped.reason)}")
        show_studies(matrix.studies)
    if estimate is not False:
        _print_estimate(matrix.runs, jobs, store, measure=bool(estimate), as_json=as_json)


@bench_app.command("run", cls=Verb)
def run_command(
    file: File,
    out: Out = None,
    jobs: Jobs = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed runs again.")] = False,
    checkpoint_every: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Between checkpoints of a run; 0 for none."),
    ] = 180.0,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run an experiment, or resume it.

    Started again after an interruption, it resumes with the
    runs that are left, each from its last checkpoint. Under
    torchrun it does the distributed runs that have as many
    workers as there are ranks. The exit code is 1 if a run
    failed.

    Examples:
    $ gossamer bench run experiments/digits-1008.toml --jobs 2
    $ gossamer bench run mine.toml --out results/mine --retry
    """
    from gossamer.bench import Store, load
    from gossamer.bench.ranks import run_as_rank, under_torchrun
    from gossamer.cli.progress import Lines

    _use_data(data_dir)
    experiment = load(file)
    store = Store(out or Path("results") / experiment.name)
    if under_torchrun():
        run_as_rank(experiment, store, Lines(), retry=retry, checkpoint_s=checkpoint_every)
        return
    _run(experiment, store, jobs=jobs, retry=retry, checkpoint_s=checkpoint_every)
    _print_status(store, as_json=as_json)
    _exit_where_failed(experiment, store)


@bench_app.command("status", cls=Verb)
def status_command(folder: Folder, as_json: Json = False) -> None:
    """Show which runs are done, which failed, and why.

    Examples:
    $ gossamer bench status results/digits-1008
    $ gossamer bench status results/digits-1008 --json
    """
    from gossamer.bench import Store

    store = Store(folder)
    if not store.experiment_path.exists():
        raise UserError(
            f"a folder of records has an experiment.toml, got {folder}; "
            "make one with gossamer bench run"
        )
    _print_status(store, as_json=as_json)


bench_app.command("report", cls=Verb)(report_command)
bench_app.command("watch", cls=Verb)(watch_command)


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for records and the report.")] = Path("demo"),
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Find the fastest way to train on each link; write a report.

    Three ways to train a small GPT on 8 workers, seven to
    train digits on 8 and 64; about two minutes on two cores.
    Resumes if it was interrupted.

    Examples:
    $ gossamer demo
    $ gossamer demo --out demo --json
    """
    from gossamer.bench import Store
    from gossamer.bench.experiment import parse

    check_installed()  # before training, not after it
    text = resources.files("gossamer.bench").joinpath("demo.toml").read_text()
    experiment, store = parse(text, "demo.toml"), Store(out)
    _run(experiment, store, jobs=jobs)
    report_command(out, as_json=as_json)
    _exit_where_failed(experiment, store)


def _run(experiment: Experiment, store: Store, **options: Any) -> None:
    from gossamer.cli.progress import run_and_show

    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        run_and_show(experiment, store, **options)
    except KeyboardInterrupt as stop:
        say("interrupted; start it again to resume")
        (number,) = stop.args or (signal.SIGINT,)
        sys.exit(128 + number)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(signum: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt(signum)


def _runs_table(name: str, runs: list[RunSpec]) -> Table:
    table = Table(title=f"{name}: {len(runs)} runs")
    for heading, value in _facts(runs[0]).items():
        justify = "right" if isinstance(value, int) else "left"
        table.add_column(heading, justify=justify, no_wrap=heading == "id", overflow="fold")
    for spec in runs:
        table.add_row(*(escape(_cell(value)) for value in _facts(spec).values()))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _facts(spec: RunSpec | PlannedRun) -> dict[str, Any]:
    """Return the columns that identify a run."""
    from gossamer.registry import shorten

    return {
        "id": spec.id,
        "workload": shorten(spec.workload),
        "workers": spec.workers,
        "method": spec.method,
        "engine": spec.engine,
        "seed": spec.seed,
        "steps": spec.num_steps,
        "lr": spec.lr,
        "trial": bool(spec.validation_share),
    }


def _print_estimate(
    runs: list[RunSpec], jobs: int | None, store: Store, *, measure: bool, as_json: bool
) -> None:
    from gossamer.bench.estimate import BUDGET_S, estimate
    from gossamer.bench.threads import count_cores

    def tracked(measured: Sequence[RunSpec]) -> Iterator[RunSpec]:
        return track(measured, "measuring a few steps of each kind of run")

    budget_s = BUDGET_S if measure else 0.0
    found = estimate(runs, jobs or count_cores(), store, budget_s=budget_s, track=tracked)
    if as_json:
        show_json("estimate", found._asdict())
    elif found.seconds is None:
        say(f"{store.folder} has no records to estimate the time from; --estimate measures it")
    else:
        sources = {
            "from records": found.recorded,
            "measured": found.measured,
            "guessed": found.guessed,
        }
        kinds = ", ".join(f"{count} {how}" for how, count in sources.items() if count)
        lasting = _lasting(found.seconds)
        show(f"about {lasting} of training steps on this machine; kinds of run: {kinds}")


def _print_status(store: Store, *, as_json: bool) -> None:
    from gossamer.bench import load
    from gossamer.bench.planned import UNKNOWN, read_planned, recorded_runs
    from gossamer.cli.progress import result, title
    from gossamer.cli.studies import show_studies
    from gossamer.engine import Checkpointing

    experiment = load(store.experiment_path)
    planned = read_planned(store, experiment)
    if planned is None:
        say(f"only runs with records are listed: {UNKNOWN}")
        planned = recorded_runs(store)
    ends = {spec.id: store.ended(spec.id) for spec in planned.runs}
    saved = {spec.id: Checkpointing(store.checkpoint_folder(spec.id)).step for spec in planned.runs}
    files = {*store.run_ids()}
    there = files | {run_id for run_id, step in saved.items() if step}
    interrupted = {run_id for run_id, ended in ends.items() if ended is None and run_id in there}
    damages = {
        run_id: damage for run_id in interrupted & files if (damage := store.read(run_id).damage)
    }
    statuses: dict[str, str] = {run_id: ended.status for run_id, ended in ends.items() if ended}
    statuses |= dict.fromkeys(ends.keys() - there, "to do") | dict.fromkeys(
        interrupted, "unfinished"
    )
    statuses |= dict.fromkeys(damages, "damaged")
    if as_json:
        for spec in planned.runs:
            ended = ends[spec.id]
            how: dict[str, Any] = {"reason": damages[spec.id]} if spec.id in damages else {}
            how |= {"train_s": ended.train_s, "reason": ended.reason} if ended else {}
            how |= {"checkpoint": saved[spec.id]} if saved[spec.id] else {}
            show_json("run", _facts(spec) | {"status": statuses[spec.id]} | how)
        _print_rest_json(planned)
        return
    counts = Counter(statuses[spec.id] for spec in planned.runs)
    counts["skipped"] = len(planned.skipped)
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    show(escape(f"{experiment.name}: {', '.join(parts)}; records in {store.folder}"))
    for spec in planned.runs:
        ended = ends[spec.id]
        if ended is not None and ended.status != "done":
            show(escape(result(spec, ended)))
        elif spec.id in damages:
            show(escape(f"{damages[spec.id]}; it will be run again"))
        if step := saved[spec.id]:
            show(escape(f"{title(spec)}: has a checkpoint, step {step} of {spec.num_steps}"))
    show_studies(planned.studies)
    if counts["error"] or counts["timeout"]:
        show("gossamer bench run --retry runs the failed ones again")


def _print_rest_json(planned: Matrix | PlannedRuns) -> None:
    for skipped in planned.skipped:
        show_json("skipped", {"fields": skipped.fields, "reason": skipped.reason})
    for study in planned.studies:
        show_json("study", study.model_dump())


def _exit_where_failed(experiment: Experiment, store: Store) -> None:
    from gossamer.bench import expand
    from gossamer.bench.trials import Trials

    runs = expand(experiment, Trials(store).outcomes()).runs
    ends = [store.ended(spec.id) for spec in runs]
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
