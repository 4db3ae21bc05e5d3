"""The gap in loss of Adam with gossip to all-reduce, and variants that close it; simulated.

    python -m benchmarks.adam --workers 8 --batch-size 4 --lr 3e-3 --seeds 0,1 all_reduce gossip

One-peer exponential, atc by default, clipping at norm 1, weight decay 0.1, cosine after a warm-up,
batches and initial parameters from the workload's seeds. Every rule is written out on stacked
parameters [W, N], so that a rule that needs other workers' gradients is one more line, outside the
package.
One JSON line per run: the test loss, in nats, of the average of all workers, and CPU seconds.
"""

# W: workers, N: numbers per worker

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.optim import SGD

from gossamer import Simulation
from gossamer.engine import RunSpec
from gossamer.engine.batches import Batches
from gossamer.optim import auto_smoothing
from gossamer.topology import Round, complete, from_matrix
from gossamer.workloads.evaluation import token_loss

WEIGHT_DECAY, EPS, CLIP = 0.1, 1e-8, 1.0


@dataclass(frozen=True)
class Rule:
    """How workers' moments are computed; see ``VARIANTS``."""

    window: int = 1
    """Steps between two commits of moments."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Per step, as Adam's."""

    powers: bool = True
    """Whether betas are raised to the power of the window if a moment is committed once per window;
    otherwise they are per window, as in the paper."""

    all_reduce: bool = False
    """Whether gradients are averaged before clipping, as with DDP."""

    shared: str = "no"
    """How the window's mean gradient is averaged over workers before the commit: by the exact
    ``"mean"``, or by the ``"round"`` of that step."""

    first_moment: str = "window"
    """Whether m is committed once per ``"window"``, or at every ``"step"`` as Adam's, v alone being
    windowed."""

    fresh: bool = True
    """Whether v~ contains the square of this step's own gradient."""

    second_moment: str = "window"
    """What v is of: the ``"window"``'s gradients, the worker's moving average as in SmoothAdam
    (``"smooth"``), or the ``"mean"`` of all workers' clipped gradients, which no worker knows."""

    both_smooth: bool = False
    """Whether m is of the smoothed gradients as well, with a beta that gives it Adam's delay."""

    halved: bool = False
    """Whether smoothing stands for the mean of half as many workers."""

    bounded: bool = True
    """Whether v is at least what Adam adds to it for the step's own gradient, as in SmoothAdam."""

    mixed_first: bool = False
    """Whether, not overlapped, m is mixed as parameters are."""

    clip: str = "own"
    """The norm that decides on clipping: of the worker's ``"own"`` gradient, or that of the mean
    gradient of all (``"mean"``), which a worker could at best estimate; ``"no"`` for none."""

    overlapped: bool = False
    """Whether parameters are mixed as in awc: before the update, with the gradient at the worker's
    own parameters before mixing."""

    halves: bool = False
    """Whether, overlapped, half of what mixing changes is applied at once and half a step later:
    with windows differences between workers are then as stable as the mean of all is."""

    complete: bool = False
    """Whether all workers average at every step: the remaining gap is not due to the graph."""

    quasi_global: bool = False
    """Whether moments are of the normalised change of parameters in a step, including mixing,
    instead of gradients (Lin et al., https://arxiv.org/abs/2102.04761)."""


VARIANTS = {
    "all_reduce": Rule(all_reduce=True),
    "all_reduce4": Rule(4, all_reduce=True),
    "all_reduce8": Rule(8, all_reduce=True),
    "gossip": Rule(),
    "accum2": Rule(2),
    "accum4": Rule(4),
    "accum8": Rule(8),
    "accum16": Rule(16),
    "per_window4": Rule(4, powers=False),
    "per_window8": Rule(8, powers=False),
    "shared4": Rule(4, shared="mean"),
    "shared8": Rule(8, shared="mean"),
    "shared16": Rule(16, shared="mean"),
    "shared_round4": Rule(4, shared="round"),
    "shared_round8": Rule(8, shared="round"),
    "v_only4": Rule(4, first_moment="step"),
    "v_only8": Rule(8, first_moment="step"),
    "v_only16": Rule(16, first_moment="step"),
    "v_only8_shared": Rule(8, first_moment="step", shared="mean"),
    "stale_v4": Rule(4, first_moment="step", fresh=False),
    "stale_v8": Rule(8, first_moment="step", fresh=False),
    "stale_v16": Rule(16, first_moment="step", fresh=False),
    "clip_mean4": Rule(4, clip="mean"),
    "clip_mean8": Rule(8, clip="mean"),
    "clip_mean": Rule(clip="mean"),
    "no_clip4": Rule(4, clip="no"),
    "no_clip": Rule(clip="no"),
    "smooth": Rule(second_moment="smooth"),
    "smooth_awc": Rule(second_moment="smooth", overlapped=True),
    "smooth_unbounded_awc": Rule(second_moment="smooth", bounded=False, overlapped=True),
    "smooth_complete": Rule(second_moment="smooth", complete=True),
    "smooth_half_awc": Rule(second_moment="smooth", halved=True, overlapped=True),
    "smooth_both_awc": Rule(second_moment="smooth", both_smooth=True, overlapped=True),
    "smooth_mixed": Rule(second_moment="smooth", mixed_first=True),
    "mean_v": Rule(second_moment="mean"),
    "mean_v_awc": Rule(second_moment="mean", overlapped=True),
    "mean_v_complete": Rule(second_moment="mean", complete=True),
    "quasi_global": Rule(quasi_global=True),
    "complete": Rule(complete=True),
    "accum8_complete": Rule(8, complete=True),
    "gossip_awc": Rule(overlapped=True),
    "accum2_awc": Rule(2, overlapped=True),
    "accum4_awc": Rule(4, overlapped=True),
    "accum8_awc": Rule(8, overlapped=True),
    "accum4_awc_halves": Rule(4, overlapped=True, halves=True),
    "accum8_awc_halves": Rule(8, overlapped=True, halves=True),
    "accum8_complete_awc": Rule(8, overlapped=True, complete=True),
}


class Workers:
    """All workers' parameters and moments, updated by a rule."""

    def __init__(self, rule: Rule, parameters: list[Tensor]) -> None:
        self._rule, self._parameters = rule, parameters
        self._x = _stack(parameters)
        self._m, self._v, self._average = (torch.zeros_like(self._x) for _ in range(3))
        self._change, self._squares = (torch.zeros_like(self._x) for _ in range(2))
        self._num_steps = 0

    def gradients(self) -> Tensor:
        """Return all workers' gradients, [W, N]."""
        return _stack([p.grad for p in self._parameters if p.grad is not None])

    def step(self, grads: Tensor, lr: float, round: Round) -> None:
        """Clip, update and mix, from all workers' gradients."""
        rule, before = self._rule, self._x.clone()
        mixing = torch.from_numpy(round.matrix().toarray()).float()
        grads = self._clipped(grads)
        if rule.overlapped and self._num_steps:
            mixed = mixing @ self._x
            change, self._change = self._change, mixed - self._x
            self._x = self._x + (change + self._change) / 2 if rule.halves else mixed
        self._num_steps += 1
        self._x.mul_(1 - lr * WEIGHT_DECAY)
        self._x.sub_(lr * self._direction(grads, mixing))
        if not rule.overlapped:
            self._x = mixing @ self._x
            if rule.mixed_first:
                self._m = mixing @ self._m
        if rule.quasi_global:
            change = before - self._x
            change /= change.norm(dim=1, keepdim=True).clamp(min=1e-12)
            self._m.lerp_(change, 1 - rule.betas[0])
            self._v.lerp_(change**2, 1 - rule.betas[1])
        _unstack_(self._parameters, self._x)

    def _clipped(self, grads: Tensor) -> Tensor:
        mean = grads.mean(0, keepdim=True)
        if self._rule.all_reduce:
            grads = mean.expand_as(grads)
        norms = {
            "own": grads.norm(dim=1, keepdim=True),
            "mean": mean.norm(dim=1, keepdim=True),
            "no": torch.zeros(1),
        }[self._rule.clip]
        return grads / (norms / CLIP).clamp(min=1)

    def _direction(self, grads: Tensor, mixing: Tensor) -> Tensor:
        rule, t = self._rule, self._num_steps
        if rule.second_moment != "window":
            return self._two_gradients_direction(grads)
        power = rule.window if rule.powers else 1
        b1, b2 = rule.betas[0] ** power, rule.betas[1] ** power
        k = t if rule.quasi_global else math.ceil(t / rule.window)
        v = self._v.lerp(grads**2, 1 - b2) if rule.fresh or k == 1 else self._v
        if rule.first_moment == "step":
            m = self._m.lerp_(grads, 1 - rule.betas[0])
            m_weight = 1 - rule.betas[0] ** t
        else:
            m, m_weight = self._m.lerp(grads, 1 - b1), 1 - b1**k
        v_weight = 1 - b2**k if rule.fresh or k == 1 else 1 - b2 ** (k - 1)
        if rule.first_moment == "step" and k == 1:
            # The square of one gradient is next to nothing where the mean of several is not.
            self._squares += grads**2
            v, v_weight = self._squares / t, 1.0
        direction = m / m_weight / ((v / v_weight).sqrt() + EPS)
        self._average += grads / rule.window
        if t % rule.window == 0 and not rule.quasi_global:
            if rule.shared != "no":
                mean = self._average.mean(0, keepdim=True).expand_as(self._average)
                self._average = mean.clone() if rule.shared == "mean" else mixing @ self._average
            if rule.first_moment == "window":
                self._m.lerp_(self._average, 1 - b1)
            self._v.lerp_(self._average**2, 1 - b2)
            self._average.zero_()
        return direction

    def _two_gradients_direction(self, grads: Tensor) -> Tensor:
        """Return the direction where the two moments are of different gradients."""
        rule, t = self._rule, self._num_steps
        b1, b2 = rule.betas
        own = grads
        if rule.second_moment == "mean":
            squared = grads.mean(0, keepdim=True).expand_as(grads)
        else:
            decay = auto_smoothing(len(grads) // 2 if rule.halved else len(grads))
            squared = self._average.lerp_(grads, 1 - decay) / (1 - decay**t)
            if rule.both_smooth:
                delay = b1 / (1 - b1) - decay / (1 - decay)
                grads, b1 = squared, delay / (1 + delay)
        m = self._m.lerp_(grads, 1 - b1) / (1 - b1**t)
        v = self._v.lerp_(squared**2, 1 - b2)
        if rule.second_moment == "smooth" and rule.bounded:
            v = torch.maximum(v, (1 - b2) * own**2, out=self._v)
        v = v / (1 - b2**t)
        return m / (v.sqrt() + EPS)


def _stack(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten(1) for tensor in tensors], 1)


def _unstack_(tensors: list[Tensor], x_WN: Tensor) -> None:
    start = 0
    for tensor in tensors:
        stop = start + tensor[0].numel()
        tensor.detach().copy_(x_WN[:, start:stop].view_as(tensor))
        start = stop


def run(
    spec: RunSpec, rule: Rule, observe: Callable[[int, Tensor], None] = lambda t, grads_WN: None
) -> float:
    """Train once; return the test loss of the average.

    Args:
        spec: the workload and its settings.
        rule: how workers update.
        observe: called at each step with its number, from 1, and all workers' gradients.
    """
    workload, batches = spec.make_workload(), Batches(spec, range(spec.workers))
    # Only gradients are used: the rate is zero, and the round has no neighbours.
    sim = Simulation(
        spec.make_model(), workload.loss, lambda p: SGD(p, lr=0.0), spec.workers, seed=spec.seed
    )
    nobody = from_matrix(torch.eye(spec.workers).numpy())
    everyone = complete(spec.workers)
    workers = Workers(rule, sim.optimizer.param_groups[0]["params"])
    samples = batches.draw(epoch=0)
    for t in range(spec.num_steps):
        epoch, batch = divmod(t, spec.steps_per_epoch)
        if batch == 0:
            samples = batches.draw(epoch)
        sim.step(*batches.fetch(samples[:, batch], t), round=nobody)
        everybody = rule.all_reduce or rule.complete
        round = everyone if everybody else spec.schedule.round(t)
        with torch.no_grad():
            grads = workers.gradients()
            observe(t + 1, grads)
            workers.step(grads, spec.lr_at(t), round)
    return token_loss()(sim.average().eval(), batches.data)


def spec_of(
    workload: str, workers: int, batch_size: int, lr: float, seed: int, steps: int
) -> RunSpec:
    """Return the settings of a run."""
    return RunSpec(
        workload=workload,
        workers=workers,
        algorithm="atc",
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        epochs=math.ceil(steps / 50),
        steps_per_epoch=50,
        max_steps=steps,
    )


def main(  # noqa: PLR0913 - one keyword per option
    variants: Annotated[list[str], typer.Argument(help=f"Of {', '.join(VARIANTS)}.")],
    workload: str = "stdlib-gpt",
    workers: int = 8,
    batch_size: int = 4,
    lr: str = "3e-3",
    seeds: str = "0,1",
    steps: int = 400,
    beta1: float = 0.9,
    beta2: float = 0.99,
) -> None:
    """Train every variant at every rate and seed."""
    torch.set_num_threads(1)
    for rate in map(float, lr.split(",")):
        for seed in map(int, seeds.split(",")):
            for name in variants:
                rule = dataclasses.replace(VARIANTS[name], betas=(beta1, beta2))
                spec = spec_of(workload, workers, batch_size, rate, seed, steps)
                start = time.process_time()
                loss = run(spec, rule)
                settings = {"workers": workers, "batch_size": batch_size, "steps": steps}
                found = {"loss": round(loss, 4), "cpu_s": round(time.process_time() - start, 1)}
                settings |= {"lr": rate, "beta1": beta1, "beta2": beta2, "seed": seed}
                print(json.dumps({"variant": name, **settings, **found}), flush=True)


if __name__ == "__main__":
    typer.run(main)
