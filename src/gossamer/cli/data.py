"""The verb `gossamer data`: download a data set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gossamer.cli.names import complete
from gossamer.cli.terminal import say

DataDir = Annotated[
    Path | None, typer.Option(help="Folder of data sets; by default GOSSAMER_DATA.")
]


def data_command(
    name: Annotated[
        str,
        typer.Argument(
            help="A data set, or a workload that uses it.", autocompletion=complete("data sets")
        ),
    ],
    data_dir: DataDir = None,
) -> None:
    """Download a data set from where it is published, and check it.

    Prints the paths of its files, one per line. Existing ones
    are not downloaded.

    Examples:
    $ gossamer data cifar10
    $ gossamer data shakespeare-gpt --data-dir ~/data
    """
    from gossamer.workloads.files import data_folder
    from gossamer.workloads.sources import download

    folder = (data_dir or data_folder()).expanduser()
    with _bar() as progress:
        paths = download(name, folder, report=say, progress=progress)
    for path in paths:
        print(path)


@contextlib.contextmanager
def _bar() -> Generator[Callable[[int, int], None]]:
    """Show the progress of a transfer on a terminal."""
    console = Console(stderr=True, emoji=False)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bars:
        bar = bars.add_task("", total=None, visible=False)
        yield lambda done, total: bars.update(
            bar, completed=done, total=total or None, visible=True
        )
