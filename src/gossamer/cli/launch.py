"""The verb `gossamer launch`: parse arguments, start workers, report those that fail."""

from __future__ import annotations

import signal
from typing import Annotated

import typer
from rich.markup import escape

from gossamer.cli.terminal import say
from gossamer.launch import OVER_MIN, RESTARTS, Place, launch


def launch_command(
    command: Annotated[list[str], typer.Argument(help="Program and arguments of a worker.")],
    workers: Annotated[int, typer.Option(help="Workers to start here.")] = 4,
    total: Annotated[int, typer.Option(help="Workers of all nodes, if there are several.")] = 0,
    first: Annotated[int, typer.Option(help="Rank of the first worker here.")] = 0,
    store: Annotated[str, typer.Option(help="host:port of the store, on the node of rank 0.")] = "",
    restarts: Annotated[int, typer.Option(help="How often each worker is restarted.")] = RESTARTS,
    over: Annotated[
        float, typer.Option(help="Minutes that others may run after one has succeeded.")
    ] = OVER_MIN,
    join: Annotated[bool, typer.Option("--join", help="Add new workers to a running job.")] = False,
) -> None:
    """Run workers that may fail one by one, for on_failure="continue".

    Unlike torchrun it lets the others continue when one
    fails, and holds the store through which they agree. A
    failed worker is restarted after 1, 2, 4 … s, and joins
    them. The exit code is 0 if any worker succeeds.

    Examples:
    $ gossamer launch --workers 4 -- python train.py
    """

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    place = Place(workers, first, total, store, join)
    code = launch(command, place, lambda line: say(escape(line)), restarts=restarts, over_min=over)
    raise typer.Exit(code)
