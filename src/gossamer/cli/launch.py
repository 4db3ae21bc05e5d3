"""The verb `gossamer launch`: parse, start workers, report those that end."""

from __future__ import annotations

import signal
from typing import Annotated

import typer
from rich.markup import escape

from gossamer.cli.terminal import say
from gossamer.launch import OVER_MIN, RESTARTS, Place, launch


def launch_command(
    command: Annotated[list[str], typer.Argument(help="Program and arguments of a worker.")],
    workers: Annotated[int, typer.Option(help="Workers to start on this node.")] = 4,
    total: Annotated[int, typer.Option(help="Workers on all nodes, if there are several.")] = 0,
    first: Annotated[int, typer.Option(help="Rank of the first worker on this node.")] = 0,
    store: Annotated[str, typer.Option(help="host:port of the store, on the node of rank 0.")] = "",
    restarts: Annotated[
        int, typer.Option(help="How often a failed worker is restarted.")
    ] = RESTARTS,
    over: Annotated[
        float, typer.Option(help="Minutes that the others get after one has finished.")
    ] = OVER_MIN,
    join: Annotated[bool, typer.Option("--join", help="Add workers to a running job.")] = False,
) -> None:
    """Run workers that may fail one by one, for on_failure="continue".

    Unlike torchrun it keeps the other workers running, and
    it hosts the store. A worker that fails is restarted,
    after 1, 2, 4 … s, and joins the others. The exit code is
    0 if a worker has finished.

    Examples:
    $ gossamer launch --workers 4 -- python train.py
    """

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    place = Place(workers, first, total, store, join)
    code = launch(command, place, lambda line: say(escape(line)), restarts=restarts, over_min=over)
    raise typer.Exit(code)
