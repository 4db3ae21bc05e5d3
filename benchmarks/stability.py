"""Why windows and overlap do not combine: differences between workers that grow by themselves.

    python -m benchmarks.stability

First a linear model. Where the loss has the curvature h, a difference x between workers has the
gradient h·x, and mixing multiplies it by an eigenvalue λ of the round: 0 for two workers that
average with each other, or for all. With a second moment of one, a = lr·h, and betas per window b
(``gossamer.optim.accum_adam``), a step is

    x ← λ·x − a·d  (awc)        x ← λ·(x − a·d)  (atc)        d = b·m + (1 − b)·x

and m ← b·m + (1 − b)·(mean x of the window) at its end. λ = 1 is the mean of all workers, and
all-reduce. The table has the largest a with which x does not grow.

Then the same on a GPT: all workers get the samples of worker 0, so that their gradients have no
noise of their own, and start a hundred-thousandth apart in every parameter. Where differences are
stable they stay as small. It prints the largest consensus distance in each quarter of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.optim import AdamW, Optimizer

from gossamer import Simulation
from gossamer.engine import RunSpec
from gossamer.engine.batches import Batches
from gossamer.engine.spec import set_lr
from gossamer.optim import AccumAdamW, SmoothAdamW

WINDOWS = (1, 2, 4, 8)

_SETTINGS: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.1}

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, **_SETTINGS),
    "AccumAdamW, window 4": lambda p: AccumAdamW(p, **_SETTINGS, window=4),
    "AccumAdamW, window 8": lambda p: AccumAdamW(p, **_SETTINGS, window=8),
    "SmoothAdamW": lambda p: SmoothAdamW(p, **_SETTINGS),
}

_MOST = 100.0
"""Above all that is stable with these betas."""

_APART = 1e-5
"""Standard deviation of parameters between workers at the start."""


def grows(a: float, eigenvalue: float, window: int, beta: float, *, overlaps: bool) -> bool:
    """Return whether a difference between workers grows from window to window.

    Args:
        a: learning rate times curvature.
        eigenvalue: by which mixing multiplies it.
        window: steps from one commit of the first moment to the next.
        beta: the decay of the first moment per step.
        overlaps: whether the gradient is taken before mixing, as in awc.
    """
    b = beta**window
    x, m = np.eye(2)  # both as linear functions of x and m at the begin of the window
    mean = np.zeros(2)
    for _ in range(window):
        update = a * (b * m + (1 - b) * x)
        mean += x / window
        x = eigenvalue * x - update if overlaps else eigenvalue * (x - update)
    m = b * m + (1 - b) * mean
    return bool(abs(np.linalg.eigvals([x, m])).max() > 1 + 1e-9)


def largest_stable(eigenvalue: float, window: int, beta: float, *, overlaps: bool) -> float:
    """Return the largest rate times curvature with which a difference does not grow."""
    low, high = 0.0, _MOST
    if not grows(high, eigenvalue, window, beta, overlaps=overlaps):
        return math.inf
    while high - low > 1e-3:
        middle = (low + high) / 2
        if grows(middle, eigenvalue, window, beta, overlaps=overlaps):
            high = middle
        else:
            low = middle
    return low


def distances(spec: RunSpec, optimizer: Callable[[Any], Optimizer], num_steps: int) -> list[float]:
    """Return the consensus distance after every step, where all workers get the same samples."""
    batches = Batches(spec, range(spec.workers))
    sim = Simulation(
        spec.make_model(),
        spec.make_workload().loss,
        optimizer,
        spec.workers,
        spec.topology,
        algorithm=spec.algorithm,
        clip_norm=spec.clip_norm,
    )
    generator = torch.Generator().manual_seed(spec.seed)
    for parameter in sim.parameters.values():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=_APART)
    samples = batches.draw(epoch=0)
    found: list[float] = []
    for step in range(num_steps):
        epoch, batch = divmod(step, spec.steps_per_epoch)
        if batch == 0:
            samples = batches.draw(epoch)
        set_lr(sim.optimizer, spec.lr_at(step))
        sim.step(*batches.fetch(samples[:1, batch].repeat(spec.workers, axis=0), step))
        found.append(sim.consensus_distance())
    return found


def _quarters(values: Sequence[float]) -> str:
    return " | ".join(f"{max(part):.0e}" for part in np.array_split(values, 4))


def main(
    workers: int = 8,
    batch_size: int = 4,
    steps: Annotated[int, typer.Option(min=4, max=500, help="The first of a run of 500.")] = 200,
    lr: str = "1e-3,3e-3",
) -> None:
    """Print what is stable in the linear model, and the distances of a GPT."""
    torch.set_num_threads(1)
    print("| β₁ | window | mean of all, all-reduce | differences, atc | differences, awc |")
    print("|---|---|---|---|---|")
    for beta in (0.9, 0.7):
        for window in WINDOWS:
            cells = [
                largest_stable(eigenvalue, window, beta, overlaps=overlaps)
                for eigenvalue, overlaps in ((1.0, False), (0.0, False), (0.0, True))
            ]
            print(f"| {beta} | {window} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")
    print("\n| rate | optimizer | algorithm | first quarter of steps | second | third | fourth |")
    print("|---|---|---|---|---|---|---|")
    for rate in map(float, lr.split(",")):
        for name, optimizer in OPTIMIZERS.items():
            for algorithm in ("atc", "awc"):
                spec = RunSpec(
                    workload="stdlib-gpt",
                    workers=workers,
                    topology="one_peer_exponential",
                    algorithm=algorithm,
                    batch_size=batch_size,
                    lr=rate,
                    clip_norm=1.0,
                    epochs=10,
                    steps_per_epoch=50,
                )
                row = f"| {rate:g} | {name} | {algorithm} "
                print(f"{row}| {_quarters(distances(spec, optimizer, steps))} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
