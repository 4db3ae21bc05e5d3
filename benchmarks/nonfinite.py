"""What it costs to look, before every round, whether parameters are finite.

    python -m benchmarks.nonfinite [--parameters 10000000] [--repeats 15]

One look at the buckets of a model in single precision on one thread, beside training steps of two
models of about as many parameters, a mixing with one neighbour, and the look at every number that
only parameters get that are not finite. All are interleaved. Prints JSON, then a table.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import nn

from benchmarks.sketch import step_of
from gossamer.nonfinite import measured_norms

_BUCKET = 6_250_000
"""Parameters in a bucket of 25 MB."""


def main(
    parameters: Annotated[int, typer.Option(help="Of the models.")] = 10_000_000,
    repeats: Annotated[int, typer.Option(help="Of which medians are taken.")] = 15,
) -> None:
    """Print the cost of a look, and its share of a step."""
    torch.set_num_threads(1)
    times = cost(parameters, repeats)
    print(json.dumps(times), flush=True)
    print("\n| what | ms | look / what |\n|---|---|---|")
    for what, ms in times.items():
        print(f"| {what} | {ms:.2f} | {100 * times['look'] / ms:.2f} % |")


def cost(parameters: int, repeats: int) -> dict[str, float]:
    """Return milliseconds, medians of interleaved repeats."""
    buckets = list(torch.randn(parameters).split(_BUCKET))
    received = [torch.randn_like(bucket) for bucket in buckets]
    spoiled = [bucket.clone() for bucket in buckets]
    spoiled[-1][-1] = torch.nan
    width = round((parameters / 3) ** 0.5)
    layers = max(1, parameters // (12 * 384**2))
    perceptron = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    transformer = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True), layers
    )

    def mix() -> None:
        for bucket, arrived in zip(buckets, received, strict=True):
            bucket.lerp_(arrived, 0.5)

    tasks: dict[str, Callable[[], object]] = {
        "look": lambda: measured_norms([bucket[None] for bucket in buckets]),
        "look that finds something": lambda: measured_norms([bucket[None] for bucket in spoiled]),
        "mixing with one neighbour": mix,
        "step of an mlp, batch 32": step_of(perceptron, torch.randn(32, width)),
        "step of an mlp, batch 256": step_of(perceptron, torch.randn(256, width)),
        "step of a transformer, 8 x 64 tokens": step_of(transformer, torch.randn(8, 64, 384)),
    }
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - start)
    return {name: round(1e3 * statistics.median(t[1:]), 2) for name, t in times.items()}


if __name__ == "__main__":
    typer.run(main)
