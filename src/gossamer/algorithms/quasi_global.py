"""Quasi-global momentum: a momentum of how the model moved, mixing included.

    m = β m̂ + g
    x_{t+1} = W_t (x_t − η m)
    m̂ ← μ m̂ + (1 − μ) (x_t − x_{t+1}) / η

1. Add the momentum to the gradient.
2. Optimizer step: SGD without a momentum of its own.
3. Exchange and mix; let the momentum follow the whole change.

Where workers' data differ, a momentum of local gradients pulls them apart; the change of parameters
is nearer to what all of them do. One exchange per step, nothing more is sent. Reference: Lin et al.
(https://arxiv.org/abs/2102.04761).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from torch.optim import SGD, Optimizer

from gossamer.algorithms.algorithm import Algorithm, StepContext, mix
from gossamer.errors import UserError


@final
@dataclass(frozen=True)
class QuasiGlobal(Algorithm):
    """atc with a momentum of the whole change.

    Args:
        beta: how much of the momentum goes into a step, β.
        mu: how much of it stays, μ.
    """

    beta: float = 0.9
    mu: float = 0.9

    name = "quasi_global"
    kept = ("momentum", "start")
    scratch = ("start",)

    def __post_init__(self) -> None:
        for name, share in (("beta", self.beta), ("mu", self.mu)):
            if not 0 <= share < 1:
                raise UserError(
                    f"quasi_global needs 0 <= {name} < 1, got {share}; 0.9 is the paper's"
                )

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse optimizers that have a momentum already."""
        for optimizer in optimizers:
            groups = optimizer.param_groups
            others = [name for name in ("momentum", "maximize") if any(g.get(name) for g in groups)]
            if not isinstance(optimizer, SGD) or others:
                given = " and ".join([type(optimizer).__name__, *others])
                raise UserError(
                    "quasi_global is the momentum of torch.optim.SGD that has none and minimizes, "
                    f"got {given}; use SGD(params, lr=...), or algorithm='atc'"
                )

    def before_update(self, context: StepContext, step: int) -> None:
        """Add the momentum to the gradient, and note where the step starts."""
        momenta, starts = context.memory("momentum"), context.memory("start")
        tensors = (context.parameters, context.gradients(), momenta, starts)
        for x, g, m, start in zip(*tensors, strict=True):
            g.add_(m, alpha=self.beta)
            start.copy_(x)

    def after_update(self, context: StepContext, step: int) -> None:
        """Mix, and let the momentum follow the whole change."""
        (round,) = context.rounds(step)
        mix(context, round, step)
        momenta, starts = context.memory("momentum"), context.memory("start")
        tensors = (context.parameters, momenta, starts, context.learning_rates())
        for x, m, start, lr in zip(*tensors, strict=True):
            if lr > 0:  # else nothing moved by itself
                m.mul_(self.mu).add_(start - x, alpha=(1 - self.mu) / lr)
