"""The command line: each verb parses its arguments, makes one library call and prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gossamer.bench.command import bench_app, data_command, demo_command
from gossamer.errors import UserError
from gossamer.lab.command import lab_command
from gossamer.picture import first_rounds
from gossamer.topology import CATALOGUE, Round, Schedule, parse
from gossamer.topology.catalogue import example
from gossamer.topology.summary import Summary, summarize

app = typer.Typer(
    name="gossamer",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()

Workers = Annotated[int, typer.Option("--workers", "-n", help="Number of workers.")]
Params = Annotated[
    float, typer.Option(min=1, help="Parameters of the model, sent as 4 bytes each.")
]


@app.callback()
def gossamer() -> None:
    """Decentralized data-parallel training for PyTorch.

    Workers mix parameters with a few neighbours instead of all-reducing gradients.
    """


@app.command(rich_help_panel="Look")
def topology(
    name: Annotated[str | None, typer.Argument(help='A topology, such as "lattice(k=4)".')] = None,
    workers: Workers = 16,
    params: Params = 25.6e6,
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds to show.")] = 4,
    html: Annotated[Path | None, typer.Option(help="Write a picture as a page.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture as an image.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Compare the communication graphs, or look at one of them.

    Examples: `gossamer topology -n 16`, `gossamer topology "lattice(k=4)" -n 32 --html graph.html`.
    """
    pictures = _check_pictures(html=html, png=png)
    schedules, missing = _build(name, workers)
    summaries = [summarize(schedule) for schedule in schedules]
    if as_json:
        _print_json(summaries, missing, params)
    else:
        console.print(_summary_table(summaries, params))
        for topology_name, reason in missing.items():
            console.print(f"[dim]no {topology_name}: {escape(reason)}[/]", highlight=False)
        if name is not None:
            _print_rounds(schedules[0], rounds)
    _save_pictures(schedules, name, rounds, pictures)


app.command("demo", rich_help_panel="Measure")(demo_command)
app.command("data", rich_help_panel="Measure")(data_command)
app.command("lab", rich_help_panel="Measure")(lab_command)
app.add_typer(bench_app, name="bench", rich_help_panel="Measure")


def _build(name: str | None, workers: int) -> tuple[list[Schedule], dict[str, str]]:
    """Return the named schedule, or the whole catalogue and why some of it cannot be built."""
    if name is not None:
        return [parse(example(name) if name in CATALOGUE else name, workers)], {}
    schedules: list[Schedule] = []
    missing: dict[str, str] = {}
    for entry in CATALOGUE:
        try:
            schedules.append(parse(example(entry), workers))
        except UserError as error:
            missing[entry] = str(error)
    if not schedules:
        raise UserError(missing["complete"])
    return schedules, missing


def _print_json(summaries: list[Summary], missing: dict[str, str], params: float) -> None:
    for summary in summaries:
        print(json.dumps(asdict(summary) | {"bytes_sent": 4 * params * summary.copies_sent}))
    for name, reason in missing.items():
        print(json.dumps({"name": name, "missing": reason}))


def _print_rounds(schedule: Schedule, limit: int) -> None:
    description = CATALOGUE[schedule.name.partition("(")[0]].build.__doc__ or ""
    console.print(escape(description.splitlines()[0]), highlight=False)
    for step, round in first_rounds(schedule, limit):
        console.print(_round_table(round, step))


def _summary_table(summaries: list[Summary], params: float) -> Table:
    table = Table(title=f"{summaries[0].num_workers} workers, {params / 1e6:.3g} M parameters")
    table.add_column("topology")
    for heading in ("degree", "messages", "MB sent", "p", "exact after"):
        table.add_column(heading, justify="right")
    for summary in summaries:
        exact = summary.rounds_to_consensus
        table.add_row(
            summary.name,
            str(summary.degree),
            f"{summary.messages:.4g}",
            f"{summary.copies_sent * params * 4 / 1e6:,.0f}",
            "–" if summary.mixing_rate is None else f"{summary.mixing_rate:.3g}",
            "asymptotic" if exact is None else f"{exact} round{'s'[exact == 1 :]}",
        )
    table.caption = (
        "messages and MB of the busiest worker per round, groups as all-reduces;\n"
        "p: share of the squared consensus error removed, at least, per round of a cycle"
    )
    return table


def _round_table(round: Round, step: int, most: int = 32) -> Table:
    table = Table(title=f"round {step}", title_justify="left")
    for heading in ("worker", "keeps", "receives from", "sends to"):
        table.add_column(heading, justify="left" if " " in heading else "right")
    for worker in range(min(most, round.num_workers)):
        part = round.neighbours(worker)
        heard = zip(*part.receives, strict=True)
        table.add_row(
            str(worker),
            f"{part.self_weight:.3g}",
            _listed([f"{sender} × {weight:.3g}" for sender, weight in heard]),
            _listed([str(receiver) for receiver in part.sends.workers]),
        )
    if round.num_workers > most:
        table.caption = f"the first {most} of {round.num_workers} workers"
    return table


def _listed(items: list[str], most: int = 8) -> str:
    rest = f"  … ({len(items)} in all)" if len(items) > most else ""
    return "  ".join(items[:most]) + rest


def _check_pictures(**paths: Path | None) -> list[Path]:
    """Return the pictures asked for, after a check that each is of its option's kind."""
    for kind, path in paths.items():
        if path is not None and path.suffix.lower() != f".{kind}":
            raise UserError(f"--{kind} writes a .{kind} file, got {path.name!r}; change its ending")
    return [path for path in paths.values() if path is not None]


def _save_pictures(
    schedules: list[Schedule], name: str | None, rounds: int, paths: list[Path]
) -> None:
    if not paths:
        return
    from gossamer import picture  # plotly takes a while to import

    figure = picture.gallery(schedules) if name is None else picture.draw(schedules[0], rounds)
    for path in paths:
        picture.save(figure, path)
        Console(stderr=True).print(f"wrote {path}", highlight=False)


def main() -> None:
    """Run the command line; a UserError is one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)
