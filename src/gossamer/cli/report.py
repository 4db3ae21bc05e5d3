"""The verbs `gossamer bench report` and `gossamer bench watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.names import complete_results
from gossamer.cli.terminal import Json, say, show, show_json
from gossamer.extras import needed_by

Folder = Annotated[Path, typer.Argument(help="Folder of records.", autocompletion=complete_results)]


def report_command(
    folder: Folder,
    out: Annotated[
        Path | None, typer.Option(help="The page.", show_default="FOLDER/report.html")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write figures as .png, .svg and .pdf into this folder.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Write tables as .csv, .parquet and .tex into this folder.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write curves for TensorBoard into this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page: which method wins, at what cost, and why.

    Examples:
    $ gossamer bench report results/digits-1008
    $ gossamer bench report demo --tables tables --json
    """
    check_installed()
    from gossamer.bench.report.writing import write_report
    from gossamer.cli.summary import summary_table

    page = out or folder / "report.html"
    results = write_report(
        folder, page, figures_dir=figures, tables_dir=tables, tensorboard_dir=tensorboard
    )
    if as_json:
        for kind, table in (
            ("result", results.analysis.summary),
            ("target", results.analysis.targets),
            ("link", results.analysis.links),
            ("verdict", results.analysis.verdicts),
        ):
            for row in table.iter_rows(named=True):
                show_json(kind, row)
    else:
        show(summary_table(results.analysis))
    if results.missing:
        say(f"partial: {results.missing} runs have no result yet")
    for path in (page, figures, tables, tensorboard):
        if path is not None:
            say(f"wrote {path}")


def watch_command(
    folder: Folder,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free port.")] = 0,
) -> None:
    """Serve the report to a browser while runs are in progress.

    Prints its address on this machine; stop it with Ctrl-C.

    Examples:
    $ gossamer bench watch results/digits-1008
    $ gossamer bench watch demo --port 8000
    """
    check_installed()
    from gossamer.bench.report.watch import Watch

    server = Watch(folder, port)
    print(server.url, flush=True)
    say("open this address in a browser; Ctrl-C stops the server")
    try:
        server.serve()
    except KeyboardInterrupt:
        say("stopped")


def check_installed() -> None:
    """Raise if the extra that draws figures is not installed."""
    with needed_by("reports need"):
        import jinja2  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import plotly  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import polars  # noqa: F401  # pyright: ignore[reportUnusedImport]
