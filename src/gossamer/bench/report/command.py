"""The verbs `gossamer bench report` and `gossamer bench watch`.

What draws is imported when a verb runs: other verbs and --help need none of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gossamer.errors import UserError

_Folder = Annotated[Path, typer.Argument(help="Where records are kept.")]


def report_command(
    folder: _Folder,
    out: Annotated[
        Path | None, typer.Option(help="The page; by default report.html in the folder.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write figures as .png and .svg into this folder.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Write tables as .csv and .parquet into this folder.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write curves for TensorBoard into this folder.")
    ] = None,
) -> None:
    """Write a page that says which method wins at which scale, what it costs, and why.

    For example: gossamer bench report results/digits --tables tables
    """
    check_installed()
    from gossamer.bench.report.terminal import summary_table
    from gossamer.bench.report.writing import write_report

    page = out or folder / "report.html"
    results = write_report(
        folder, page, figures_dir=figures, tables_dir=tables, tensorboard_dir=tensorboard
    )
    Console(highlight=False).print(summary_table(results.analysis))
    if results.missing:
        _say(f"partial: {results.missing} runs have no result yet")
    for path in (page, figures, tables, tensorboard):
        if path is not None:
            _say(f"wrote {path}")


def watch_command(
    folder: _Folder,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
) -> None:
    """Show the page of an experiment while its runs go on, to a browser on this machine.

    For example: gossamer bench watch results/digits
    """
    check_installed()
    from gossamer.bench.report.watch import Watch

    server = Watch(folder, port)
    print(server.url, flush=True)
    _say("open this address; Ctrl-C ends it")
    try:
        server.serve()
    except KeyboardInterrupt:
        _say("ended")


def check_installed() -> None:
    """Raise where the extra that draws is not installed."""
    try:
        import jinja2  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import plotly  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import polars  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise UserError(
            f"reports need {error.name}, which is not installed; pip install 'gossamer[bench]'"
        ) from error


def _say(line: str) -> None:
    Console(stderr=True, highlight=False).print(line, markup=False)
