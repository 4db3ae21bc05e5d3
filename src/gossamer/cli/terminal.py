"""Output: results to stdout; errors, notes and progress to stderr.

So the stdout of every verb can be piped, and with --json it is one object per line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich import progress
from rich.console import Console, RenderableType
from rich.markup import escape

_UNLIMITED = 10_000

_Item = TypeVar("_Item")

Json = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]


def show(result: RenderableType) -> None:
    """Print a result; a string may have rich's markup."""
    _print(Console(highlight=False, emoji=False), result)


def show_json(kind: str, fields: Mapping[str, Any]) -> None:
    """Print a result as one line of JSON; NaN and infinities become null."""
    print(json.dumps(_finite({"kind": kind, **fields}), allow_nan=False))


def say(note: str) -> None:
    """Print a note to stderr."""
    _print(_stderr(), escape(note))


def say_error(reason: str) -> None:
    """Print an error in one line."""
    _print(_stderr(), f"[bold red]error:[/] {escape(' '.join(reason.split()))}")


def track(items: Sequence[_Item], doing: str) -> Iterator[_Item]:
    """Yield items with a progress bar on a terminal, or after one line elsewhere."""
    console = _stderr()
    if not console.is_terminal:
        say(doing)
        yield from items
        return
    yield from progress.track(items, escape(doing), console=console, transient=True)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, emoji=False)


def _print(console: Console, part: RenderableType) -> None:
    if not console.is_terminal:
        # Not a terminal: do not wrap lines or truncate tables, as a program may read them.
        wide = console.options.update(max_width=_UNLIMITED)
        console.width = max(console.width, console.measure(part, options=wide).maximum)
    console.print(part)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
