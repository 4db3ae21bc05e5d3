"""The verbs `gossamer profile` and `gossamer plan`: from a job to a file, from it to advice."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from gossamer.cli.names import complete, names, with_endings
from gossamer.cli.terminal import Json, say, show, show_json
from gossamer.errors import UserError

if TYPE_CHECKING:
    from gossamer.runtime_model.plan import Plan, Row

_SHEET = "From data sheets"


def plan_command(  # noqa: PLR0913 - one parameter per option
    profile: Annotated[Path, typer.Argument(help="A profile, from gossamer profile.")],
    workers: Annotated[str, typer.Option(help="Scales, separated by commas.")] = "8,16,32,64",
    topology: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these for gossip; repeatable.", autocompletion=complete("topologies")
        ),
    ] = None,
    strong: Annotated[
        bool, typer.Option("--strong", help="Keep the global batch size constant.")
    ] = False,
    link: Annotated[
        str,
        typer.Option(
            help="Another rate between nodes, such as 300mbit or 25gbit.",
            autocompletion=complete("links"),
        ),
    ] = "",
    algorithm: Annotated[
        str, typer.Option(help="What a step of gossip does; see docs/algorithms.md.")
    ] = "awc",
    every: Annotated[int, typer.Option(min=1, help="Steps from one exchange to the next.")] = 1,
    wire: Annotated[
        str, typer.Option(help="Wire format of parameters; see docs/wire.md.")
    ] = "fp32",
    fragments: Annotated[
        int, typer.Option(min=1, help="Fragments of parameters, exchanged in turn.")
    ] = 1,
    html: Annotated[Path | None, typer.Option(help="Write timeline and curves as a page.")] = None,
    as_json: Json = False,
) -> None:
    """Say whether gossip would be faster, with which graph, by how much.

    Examples:
    $ gossamer plan profile.json
    $ gossamer plan profile.json --workers 8,16 --html plan.html
    $ gossamer plan profile.json --topology ring --json
    $ gossamer plan profile.json --algorithm atc --every 8
    $ gossamer plan profile.json --link 100mbit --wire "modulo(bits=8)"
    """
    from gossamer.runtime_model.plan import make_plan
    from gossamer.runtime_model.presets import link_of
    from gossamer.runtime_model.profile import read_profile

    pages = with_endings(html=html)
    given: dict[str, Any] = {"topologies": topology} if topology else {}
    job = read_profile(profile)
    if link:
        job = job.with_between(link_of(link))
    plan = make_plan(
        job,
        _scales(workers),
        strong=strong,
        algorithm=algorithm,
        every=every,
        wire=wire,
        fragments=fragments,
        **given,
    )
    if as_json:
        _print_json(plan)
    else:
        _print_tables(plan)
    for path in pages:
        from gossamer.runtime_model import page  # plotly takes a while to import

        page.write_page(plan, path)
        say(f"wrote {path}")


def _sheet(description: str, **options: Any) -> Any:
    """Return an option that describes a job from data sheets."""
    return typer.Option(help=description, rich_help_panel=_SHEET, **options)


def profile_command(  # noqa: PLR0913 - one parameter per option
    context: typer.Context,
    workload: Annotated[
        str,
        typer.Argument(
            help="A workload to measure, under torchrun.", autocompletion=complete("workloads")
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.json"),
    steps: Annotated[int, typer.Option(min=2, help="Measured steps.")] = 30,
    gpu: Annotated[
        str, _sheet(f"One of {', '.join(names('GPUs'))}.", autocompletion=complete("GPUs"))
    ] = "",
    link: Annotated[
        str,
        _sheet("Rate between nodes, such as 300mbit or 25gbit.", autocompletion=complete("links")),
    ] = "100gbit",
    params: Annotated[float, _sheet("Parameters of the model.", show_default="25.6e6")] = 25.6e6,
    flops: Annotated[
        float, _sheet("Operations of a worker's step; 0: 6 per parameter and sample.")
    ] = 0.0,
    samples: Annotated[
        float, _sheet("Samples or tokens of a worker's step, where --flops is 0.")
    ] = 4096,
    efficiency: Annotated[float, _sheet("Fraction of the GPU's peak.")] = 0.3,
    variance: Annotated[float, _sheet("Variance of normalized compute time.")] = 0.0,
    workers: Annotated[int, _sheet("Workers that the batch is for.", min=1)] = 8,
    per_node: Annotated[int, _sheet("Workers of a node.", min=1)] = 8,
    kind: Annotated[
        str, _sheet("Kind of model and optimizer, for measured losses: 'transformer, Adam'.")
    ] = "",
) -> None:
    """Measure a job, or describe it from data sheets, for a plan.

    A workload is measured under torchrun or in the lab. Your
    own script takes two lines: see docs/runtime_model.md.

    Examples:
    $ gossamer profile --gpu a100 --link 25gbit --params 65e6
    $ torchrun --nproc-per-node 4 -m gossamer profile digits-mlp
    """
    if bool(gpu) == bool(workload):
        raise UserError(
            f"a profile needs a workload or a --gpu, got {'both' if gpu else 'neither'}; "
            "write for example gossamer profile --gpu a100 --params 65e6"
        )
    _refuse_options_of_the_other(context, measured=bool(workload))
    if workload:
        from gossamer.runtime_model.measure import measure_workload  # torch takes a while to import

        measure_workload(workload, out, steps)
    else:
        from gossamer.runtime_model.presets import from_data_sheet
        from gossamer.runtime_model.profile import write_profile
        from gossamer.runtime_model.words import describe

        sheet = from_data_sheet(
            gpu,
            link,
            parameters=params,
            flops=flops or 6 * params * samples,
            workers=workers,
            workers_per_node=per_node,
            efficiency=efficiency,
            variance=variance,
        )
        if kind:
            sheet = sheet.with_kind(kind)
        write_profile(sheet, out)
        say(f"wrote {out}: {describe(sheet)}")


def _refuse_options_of_the_other(context: typer.Context, *, measured: bool) -> None:
    """Raise on options that would be ignored: --steps of a data sheet, --link of a measurement."""
    for parameter in context.command.params:
        of_sheet = getattr(parameter, "rich_help_panel", None) == _SHEET
        of_neither = parameter.name in ("workload", "out")
        source = context.get_parameter_source(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and not of_neither and of_sheet == measured:
            what, instead = ("a workload", "a --gpu") if measured else ("a --gpu", "a workload")
            raise UserError(
                f"the profile of {what} takes no {parameter.opts[0]}, which is for {instead}, got "
                "both; remove one of them"
            )


def _scales(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--workers needs integers separated by commas, got {text!r}; "
            "write for example --workers 8,16,32"
        ) from None


def _print_json(plan: Plan) -> None:
    for row in plan.rows:
        show_json("row", asdict(row))
    for advice in plan.advice:
        show_json("advice", asdict(advice))
    for name, reason in plan.missing.items():
        show_json("missing", {"name": name, "reason": reason})


def _print_tables(plan: Plan) -> None:
    from gossamer.runtime_model.words import describe, legend

    show(escape(describe(plan.profile)))
    if (plan.algorithm, plan.every) != ("awc", 1):
        show(escape(f"gossip by {plan.algorithm}, an exchange every {plan.every} steps"))
    if (plan.wire, plan.fragments) != ("fp32", 1):
        show(escape(f"wire format {plan.wire}, {plan.fragments} fragments in turn"))
    for advice in plan.advice:
        rows = [row for row in plan.rows if row.workers == advice.workers]
        show(f"\n[bold]{advice.workers} workers:[/] {escape(advice.reason)}")
        show(_table(rows, advice.method))
    for name, reason in plan.missing.items():
        show(f"[dim]no {escape(name)}: {escape(reason)}[/]")
    show(f"[dim]{escape(legend(plan.rows))}[/]")


def _table(rows: list[Row], recommended: str) -> Table:
    from gossamer.runtime_model.words import columns_of

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = columns_of(rows)
    for number, heading in enumerate(columns):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        style = "bold" if row.method == recommended else None
        table.add_row(*(cell(row) for cell in columns.values()), style=style)
    return table
