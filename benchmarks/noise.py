"""Whether what varies in a worker's gradient is noise of its own: `python -m benchmarks.noise`.

Trains with all-reduce, and follows second moments that are not used: of each worker's own
gradients, of its moving average with SmoothAdam's bound, and of the mean of all, which is Adam's
with all-reduce; of gradients before clipping. If gradients varied by noise that is independent
between workers and from step to step, the first would be n times the last for n workers, the second
equal to it. What varies from step to step but is the same for all workers is in the mean as well,
and not in the moving average.
Prints quartiles of both ratios over parameters and workers, then the root mean square of a step in
units of the rate, of the mean of all workers, with each of the three.
"""

# W: workers, N: numbers per worker

from __future__ import annotations

from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from benchmarks.adam import VARIANTS, run, spec_of
from gossamer.optim import SmoothAdam, auto_smoothing


class Moments:
    """Adam with three kinds of second moment, which follow the same gradients and move nothing."""

    def __init__(self, workers: int, betas: tuple[float, float]) -> None:
        smoothing = {"own": 0.0, "smoothed": auto_smoothing(workers), "mean": 0.0}
        self._moved = {kind: nn.Parameter(torch.empty(0)) for kind in smoothing}
        # A rate of one: from zero, parameters come to the negative update.
        self._optimizers = {
            kind: SmoothAdam([self._moved[kind]], 1.0, betas, smoothing=smoothing[kind])
            for kind in smoothing
        }

    def observe(self, grads_WN: Tensor) -> None:
        """Count one step's gradients."""
        for kind, optimizer in self._optimizers.items():
            moved = self._moved[kind]
            grads = grads_WN.mean(0, keepdim=True) if kind == "mean" else grads_WN
            moved.data = torch.zeros_like(grads)
            moved.grad = grads.clone()
            optimizer.step()

    def quartiles(self, kind: str) -> list[float]:
        """Return those of a kind's second moment over that of the mean."""
        mean = self._second_moment("mean")[0]
        seen = mean > 0  # embeddings of bytes that did not occur have none
        ratios = self._second_moment(kind)[:, seen] / mean[seen]
        ranks = [round(q * (ratios.numel() - 1)) for q in (0.25, 0.5, 0.75)]
        return [float(ratios.flatten().sort().values[rank]) for rank in ranks]

    def update(self, kind: str) -> float:
        """Return the root mean square of the mean of all workers' updates."""
        return float(self._moved[kind].data.mean(0).square().mean().sqrt())

    def _second_moment(self, kind: str) -> Tensor:
        return self._optimizers[kind].state[self._moved[kind]]["exp_avg_sq"]


def main(
    workload: str = "stdlib-gpt",
    workers: int = 8,
    batch_size: int = 4,
    lr: float = 4e-3,
    seed: int = 0,
    steps: int = 500,
    every: Annotated[int, typer.Option(help="Steps between two rows.")] = 100,
) -> None:
    """Train once and print a row per some steps."""
    torch.set_num_threads(1)
    rule = VARIANTS["all_reduce"]
    moments = Moments(workers, rule.betas)
    kinds = ("own", "smoothed", "mean")
    heads = [f"{kind} over mean: {q}" for kind in kinds[:2] for q in ("1/4", "1/2", "3/4")]
    print(f"| step | {' | '.join(heads + [f'update, {kind}' for kind in kinds])} |")
    print("|" + "---|" * (1 + len(heads) + len(kinds)))

    def observe(step: int, grads_WN: Tensor) -> None:
        moments.observe(grads_WN)
        if step == 25 or step % every == 0:
            cells = [f"{x:.2f}" for kind in kinds[:2] for x in moments.quartiles(kind)]
            cells += [f"{moments.update(kind):.2f}" for kind in kinds]
            print(f"| {step} | {' | '.join(cells)} |", flush=True)

    run(spec_of(workload, workers, batch_size, lr, seed, steps), rule, observe)


if __name__ == "__main__":
    typer.run(main)
