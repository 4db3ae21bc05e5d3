"""The cost of checking before every round whether parameters are finite.

    python -m benchmarks.nonfinite [--parameters 10000000] [--repeats 15]

One check of the buckets of a model in single precision on one thread, compared with training steps
of two models of about as many parameters, with mixing with one neighbour, and with the check of
every number, which only runs if a norm is not finite. All are interleaved. Prints JSON, then a
table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from benchmarks.interleaved import median_ms, mlp_step, transformer_step
from gossamer.nonfinite import measured_norms

_BUCKET = 6_250_000
"""Parameters in a bucket of 25 MB."""


def main(
    parameters: Annotated[int, typer.Option(help="Of the models.")] = 10_000_000,
    repeats: Annotated[int, typer.Option(help="Repetitions; medians are printed.")] = 15,
) -> None:
    """Print the cost of a check, and its share of a step."""
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

    def mix() -> None:
        for bucket, arrived in zip(buckets, received, strict=True):
            bucket.lerp_(arrived, 0.5)

    tasks: dict[str, Callable[[], object]] = {
        "look": lambda: measured_norms([bucket[None] for bucket in buckets]),
        "look that finds something": lambda: measured_norms([bucket[None] for bucket in spoiled]),
        "mixing with one neighbour": mix,
        "step of an mlp, batch 32": mlp_step(parameters, 32),
        "step of an mlp, batch 256": mlp_step(parameters, 256),
        "step of a transformer, 8 x 64 tokens": transformer_step(parameters),
    }
    return median_ms(tasks, repeats)


if __name__ == "__main__":
    typer.run(main)
