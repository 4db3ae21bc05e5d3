"""The cost of wire formats: `python -m benchmarks.wire`.

CPU time, not wall time, of one thread: other jobs may use the machine. A copy of as many numbers is
the limit by memory bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from gossamer.wire import Outbox, parse_wire

_WEIGHT = 0.5
_APART = 1e-3
"""The distance between workers; times do not depend on it."""


def main(
    params: Annotated[float, typer.Option(help="Numbers in a bucket.")] = 8.4e6,
    repeats: Annotated[int, typer.Option(help="Of each; the median counts.")] = 7,
    wire: Annotated[list[str] | None, typer.Option(help="Formats; repeatable.")] = None,
) -> None:
    """Measure the CPU time of encoding and of decoding a message."""
    torch.set_num_threads(1)
    table = Table("wire", "MB", "encode CPU ms", "decode CPU ms", "mix CPU ms", "of a copy")
    numel = round(params)
    x, other = torch.randn(numel), torch.empty(numel)
    copy_ms = cpu_ms(lambda: other.copy_(x), repeats)
    table.add_row("a copy", f"{x.nbytes / 1e6:.1f}", f"{copy_ms:.1f}", "", "", "1.0")
    for text in wire or ["bf16", "modulo(bits=8)", "modulo(bits=4)"]:
        table.add_row(text, *_measure(text, numel, repeats, copy_ms))
    Console().print(table)


def _measure(text: str, numel: int, repeats: int, copy_ms: float) -> list[str]:
    format = parse_wire(text)
    codec = format.codec(torch.float32, torch.device("cpu"))
    assert codec is not None, "fp32 sends the bucket itself"
    start = torch.randn(numel)
    theirs, ours = (start + _APART * torch.randn(numel) for _ in range(2))
    sent, own = (Outbox(codec, numel, start) for _ in range(2))
    total = torch.empty(numel)
    sent.fill(theirs)
    encode_ms = cpu_ms(lambda: own.fill(ours), repeats)
    decode_ms = cpu_ms(
        lambda: codec.take(sent.message, own.message, ours, _WEIGHT, total, first=True), repeats
    )
    mix_ms = cpu_ms(lambda: ours.add_(total), repeats)
    figures = [encode_ms, decode_ms, mix_ms, sum((encode_ms, decode_ms, mix_ms)) / copy_ms]
    return [f"{sent.message.nbytes / 1e6:.1f}", *(f"{figure:.1f}" for figure in figures)]


def cpu_ms(task: Callable[[], object], repeats: int) -> float:
    """Return the median CPU time of a task on this thread; the first turn is warm-up."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.thread_time()
        task()
        times.append(time.thread_time() - start)
    return 1e3 * statistics.median(times[1:])


if __name__ == "__main__":
    typer.run(main)
