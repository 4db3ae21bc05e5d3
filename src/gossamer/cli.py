"""The command line: each verb parses its arguments, makes one library call and prints."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from gossamer.errors import UserError

app = typer.Typer(
    name="gossamer",
    help="Decentralized data-parallel training for PyTorch.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _gossamer() -> None:  # pyright: ignore[reportUnusedFunction]
    """Decentralized data-parallel training for PyTorch."""


def main() -> None:
    """Run the command line; a UserError is one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False)
        sys.exit(2)
