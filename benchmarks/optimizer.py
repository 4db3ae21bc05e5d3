"""The cost of a step of AccumAdamW and SmoothAdamW relative to torch's AdamW.

    python -m benchmarks.optimizer

CPU time per step, interleaved over several rounds, so that other jobs affect all alike; medians,
and their ratio to torch's fused kernel. Two sets of parameters: a few large
tensors, and a GPT's, of which most are small. Prints JSON lines, then a table.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gossamer.optim import AccumAdamW, SmoothAdamW
from gossamer.workloads.models.transformer import GPT

COMPETITORS: dict[str, Callable[[list[nn.Parameter], int], Optimizer]] = {
    "AdamW, fused": lambda p, window: AdamW(p, fused=True),
    "AdamW, foreach": lambda p, window: AdamW(p, foreach=True),
    "AdamW": lambda p, window: AdamW(p),
    "AccumAdamW, window 1": lambda p, window: AccumAdamW(p, window=1),
    "AccumAdamW": lambda p, window: AccumAdamW(p, window=window),
    "SmoothAdamW": lambda p, window: SmoothAdamW(p, smoothing=0.6),
}


def large(millions: float) -> list[Tensor]:
    """Four square matrices."""
    side = round((millions * 1e6 / 4) ** 0.5)
    return [torch.randn(side, side) for _ in range(4)]


def of_a_gpt(millions: float) -> list[Tensor]:
    """Blocks of 12 width² numbers each, as many as it takes."""
    width = 128
    model = GPT(256, 64, width=width, layers=round(millions * 1e6 / (12 * width**2)), heads=4)
    return [parameter.detach() for parameter in model.parameters()]


def milliseconds(
    tensors: list[Tensor], window: int, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Return CPU time per step, by competitor and round; a round is at least a window."""
    optimizers: dict[str, Optimizer] = {}
    for name, make in COMPETITORS.items():
        parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizers[name] = make(parameters, window)
        optimizers[name].step()  # allocates its state
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            start = time.process_time()
            for _ in range(steps):
                optimizer.step()
            times[name].append((time.process_time() - start) / steps * 1e3)
    return times


def main(
    millions: Annotated[float, typer.Option(help="Parameters.")] = 8.4,
    window: int = 4,
    rounds: int = 15,
    threads: int = 1,
) -> None:
    """Print a table for each set of parameters."""
    torch.set_num_threads(threads)
    sets: dict[str, Any] = {"large tensors": large(millions), "a GPT": of_a_gpt(millions)}
    rows: list[dict[str, Any]] = []
    for words, tensors in sets.items():
        num = sum(tensor.numel() for tensor in tensors)
        label = f"{words}: {num / 1e6:.1f} M in {len(tensors)}"
        times = milliseconds(tensors, window, rounds, steps=max(4, window))
        fused = times["AdamW, fused"]
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own, fused, strict=True))
            rows.append({"parameters": label, "optimizer": name, "ms": statistics.median(own)})
            rows[-1] |= {"ratio": ratio, "window": window, "threads": threads, "rounds": rounds}
            print(json.dumps(rows[-1]), flush=True)
    print("\n| parameters | optimizer | ms | of fused |\n|---|---|---|---|")
    for row in rows:
        print("| {parameters} | {optimizer} | {ms:.1f} | {ratio:.2f} |".format(**row))


if __name__ == "__main__":
    typer.run(main)
