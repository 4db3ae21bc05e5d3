"""The verb `gossamer data`: get a data set, for a user who asks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gossamer.workloads.files import data_folder
from gossamer.workloads.sources import download


def data_command(
    name: Annotated[str, typer.Argument(help="A data set, or a workload that uses it.")],
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder for data sets; by default $GOSSAMER_DATA.")
    ] = None,
) -> None:
    """Download a data set from where it is published, and check it.

    For example: gossamer data cifar10 --data-dir ~/data
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    folder = (data_dir or data_folder()).expanduser()
    for path in download(name, folder, report=console.print):
        console.print(f"{path} is there")
