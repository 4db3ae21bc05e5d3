"""The verbs `gossamer profile` and `gossamer plan`: from a job to a file, from it to advice."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gossamer.errors import UserError
from gossamer.runtime_model.plan import Plan, Row, make_plan
from gossamer.runtime_model.presets import GPUS, LINKS, from_data_sheet
from gossamer.runtime_model.profile import Profile, read_profile, write_profile


def plan_command(
    profile: Annotated[Path, typer.Argument(help="A profile, from gossamer profile.")],
    workers: Annotated[str, typer.Option(help="Scales, separated by commas.")] = "8,16,32,64",
    topology: Annotated[
        list[str] | None, typer.Option(help="Only these for gossip; repeatable.")
    ] = None,
    strong: Annotated[
        bool, typer.Option("--strong", help="Keep the batch of all workers together.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write timeline and curves as a page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Say whether decentralized training would be faster, with which graph, by how much.

    Example: `gossamer plan profile.json --workers 8,16,32,64 --html plan.html`.
    """
    if html is not None and html.suffix.lower() != ".html":
        raise UserError(f"--html writes a .html file, got {html.name!r}; change its ending")
    given = {"topologies": topology} if topology else {}
    plan = make_plan(read_profile(profile), _scales(workers), strong=strong, **given)
    if as_json:
        _print_json(plan)
    else:
        _print_tables(plan)
    if html is not None:
        from gossamer.runtime_model import page  # plotly takes a while to import

        page.write_page(plan, html)
        Console(stderr=True).print(f"wrote {html}", highlight=False)


def profile_command(  # noqa: PLR0913 - one parameter per option
    workload: Annotated[str, typer.Argument(help="A workload to measure, under torchrun.")] = "",
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.json"),
    steps: Annotated[int, typer.Option(min=2, help="Measured steps.")] = 30,
    gpu: Annotated[str, typer.Option(help=f"From data sheets: {', '.join(GPUS)}.")] = "",
    link: Annotated[str, typer.Option(help=f"Between nodes: {', '.join(LINKS)}.")] = "100gbit",
    params: Annotated[float, typer.Option(help="Parameters of the model.")] = 25.6e6,
    flops: Annotated[
        float, typer.Option(help="Operations of a worker's step; 0: 6 per parameter and sample.")
    ] = 0.0,
    samples: Annotated[
        float, typer.Option(help="Samples or tokens of a worker's step, where --flops is 0.")
    ] = 4096,
    efficiency: Annotated[float, typer.Option(help="Share of the GPU's peak.")] = 0.3,
    variance: Annotated[float, typer.Option(help="Of normalized compute time.")] = 0.0,
    workers: Annotated[int, typer.Option(min=1, help="Workers that the batch is for.")] = 8,
    per_node: Annotated[int, typer.Option(min=1, help="Workers of a node.")] = 8,
) -> None:
    """Write a profile: measured under torchrun or in the lab, or from data sheets.

    Examples: `torchrun --nproc-per-node 4 -m gossamer profile digits-mlp`, `gossamer lab --hosts 4
    --rate 300mbit -- gossamer profile digits-mlp`, `gossamer profile --gpu a100 --params 65e6`.
    A script of your own takes two lines, see docs/runtime_model.md.
    """
    if bool(gpu) == bool(workload):
        raise UserError(
            f"a profile is of a workload or a --gpu, got {'both' if gpu else 'neither'}; "
            "write for example gossamer profile --gpu a100 --params 65e6"
        )
    if workload:
        from gossamer.runtime_model.measure import measure_workload  # torch takes a while to import

        measure_workload(workload, out, steps)
    else:
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
        write_profile(sheet, out)
        Console(stderr=True).print(f"wrote {out}: {describe(sheet)}", highlight=False)


def _scales(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--workers takes whole numbers separated by commas, got {text!r}; "
            "write for example --workers 8,16,32"
        ) from None


def _print_json(plan: Plan) -> None:
    for row in plan.rows:
        print(json.dumps({"kind": "row", **asdict(row)}))
    for advice in plan.advice:
        print(json.dumps({"kind": "advice", **asdict(advice)}))
    for name, reason in plan.missing.items():
        print(json.dumps({"kind": "missing", "topology": name, "reason": reason}))


def _print_tables(plan: Plan) -> None:
    console = Console()
    console.print(escape(describe(plan.profile)), highlight=False)
    for advice in plan.advice:
        rows = [row for row in plan.rows if row.workers == advice.workers]
        console.print(
            f"\n[bold]{advice.workers} workers:[/] {escape(advice.reason)}", highlight=False
        )
        console.print(_table(rows, advice.method))
    for name, reason in plan.missing.items():
        console.print(f"[dim]no {escape(name)}: {escape(reason)}[/]", highlight=False)
    console.print(
        f"[dim]{LEGEND}[/]",
        highlight=False,
    )


def describe(profile: Profile) -> str:
    """Return a profile in one line."""
    network = profile.network
    nodes = f", nodes of {network.workers_per_node}" if network.workers_per_node > 1 else ""
    return (
        f"{profile.name}: {profile.num_bytes / 1e6:.3g} MB in {len(profile.buckets)} buckets, "
        f"{1e3 * profile.compute_s:.3g} ms of compute (variance {profile.variance:.2g}){nodes}, "
        f"{network.between.bits_s / 1e9:.3g} Gbit/s between nodes"
    )


LEGEND = (
    "ms: mean of an iteration, then its 5th to 95th percentile; waits: ms of it without computing; "
    "gain: DDP's time over this one; MB: sent by the busiest worker; p: share of the squared "
    "consensus error removed per step; exact: steps after which nothing is left. PostLocalSGD "
    "is listed, not recommended: it averages every fourth step only."
)
HEADINGS = ("method", "ms", "5–95 %", "waits", "gain", "MB", "p", "exact")


def _table(rows: list[Row], recommended: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(HEADINGS[0], no_wrap=True)
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = row_cells(row)
        style = "bold" if row.method == recommended else None
        table.add_row(*cells, style=style)
    return table


def row_cells(row: Row) -> list[str]:
    """Return a row as texts, for a table or a page."""
    times = row.prediction
    exact = row.rounds_to_consensus
    none = "–" if row.mixing is None else "never"
    return [
        row.method,
        _ms(times.mean_s),
        f"{_ms(times.p05_s)}–{_ms(times.p95_s)}",
        _ms(times.exposed_s),
        f"{row.speedup:.2f}×",
        f"{row.bytes_per_step / 1e6:.3g}",
        "–" if row.mixing is None else f"{row.mixing:.3g}",
        none if exact is None else str(exact),
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.0995 else f"{1e3 * seconds:.2g}"
