"""The verb `gossamer topology`: compare graphs, or show one of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from gossamer.cli.names import complete, with_endings
from gossamer.cli.terminal import Json, say, show, show_json
from gossamer.errors import UserError

if TYPE_CHECKING:
    from gossamer.topology import Round, Schedule
    from gossamer.topology.summary import Summary


def topology_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help='A topology, such as "lattice(k=4)" or mine.py:name.',
            autocompletion=complete("topologies"),
        ),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", help="Number of workers.")] = 16,
    params: Annotated[
        float,
        typer.Option(
            min=1, help="Parameters of the model, of 4 bytes each.", show_default="25.6e6"
        ),
    ] = 25.6e6,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How many rounds to show.")] = 4,
    html: Annotated[Path | None, typer.Option(help="Write a picture as a page.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture as an image.")] = None,
    as_json: Json = False,
) -> None:
    """Compare communication graphs, or show the rounds of one.

    Examples:
    $ gossamer topology -n 16
    $ gossamer topology torus -n 64 --html torus.html
    $ gossamer topology "lattice(k=4)" -n 32 --json
    """
    from gossamer.topology.summary import summarize

    pictures = with_endings(html=html, png=png)
    if pictures:
        from gossamer.picture import check_drawable

        check_drawable(workers, rounds)
    schedules, missing = _build(name, workers)
    summaries = [summarize(schedule) for schedule in schedules]
    if as_json:
        _print_json(summaries, missing, params)
    else:
        show(_summary_table(summaries, params))
        for topology_name, reason in missing.items():
            show(f"[dim]no {topology_name}: {escape(reason)}[/]")
        if name is not None:
            _print_rounds(name, schedules[0], rounds)
    _save_pictures(schedules, name, rounds, pictures)


def _build(name: str | None, workers: int) -> tuple[list[Schedule], dict[str, str]]:
    """Return the named schedule, or the catalogue and why some of it cannot be built."""
    from gossamer.topology import CATALOGUE, parse
    from gossamer.topology.catalogue import example

    if name is not None:
        return [parse(example(name), workers)], {}
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
        show_json("topology", asdict(summary) | {"bytes_sent": 4 * params * summary.copies_sent})
    for name, reason in missing.items():
        show_json("missing", {"name": name, "reason": reason})


def _print_rounds(name: str, schedule: Schedule, limit: int) -> None:
    from gossamer.picture import first_rounds
    from gossamer.topology.catalogue import TOPOLOGY_REGISTRY, example

    if description := TOPOLOGY_REGISTRY.parse(example(name)).description:
        show(escape(description))
    for step, round in first_rounds(schedule, limit):
        show(_round_table(round, step))


def _summary_table(summaries: list[Summary], params: float) -> Table:
    table = Table(title=f"{summaries[0].num_workers} workers, {params / 1e6:.3g} M parameters")
    table.add_column("topology", overflow="fold")
    for heading in ("degree", "messages", "MB sent", "p"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("exact after", justify="right", overflow="fold")
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
        "p: fraction of the squared consensus error removed per round of a cycle, at least"
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


def _save_pictures(
    schedules: list[Schedule], name: str | None, rounds: int, paths: list[Path]
) -> None:
    if not paths:
        return
    from gossamer import picture  # plotly takes a while to import
    from gossamer.charts.page import save

    figure = picture.gallery(schedules) if name is None else picture.draw(schedules[0], rounds)
    for path in paths:
        save(figure, path)
        say(f"wrote {path}")
