"""Quasi-global momentum: a momentum of the change of parameters, mixing included.

    m = β m̂ + g
    x_{t+1} = W_t (x_t − η m)
    m̂ ← μ m̂ + (1 − μ) (x_t − x_{t+1}) / η

1. Add the momentum to the gradient.
2. Optimizer step: SGD without a momentum of its own.
3. Exchange and mix; update the momentum by the total change.

If workers' data differ, a momentum of local gradients drives them apart; the change of parameters
is closer to the mean of all workers' updates. One exchange per step, of parameters only. Reference:
Lin et al. (https://arxiv.org/abs/2102.04761).
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
    """atc with a momentum of the total change.

    Args:
        beta: the factor of the momentum in a step, β.
        mu: the decay of the momentum, μ.
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
        """Raise for other optimizers than SGD, and for SGD with a momentum of its own."""
        for optimizer in optimizers:
            groups = optimizer.param_groups
            others = [name for name in ("momentum", "maximize") if any(g.get(name) for g in groups)]
            if not isinstance(optimizer, SGD) or others:
                given = " and ".join([type(optimizer).__name__, *others])
                raise UserError(
                    "quasi_global needs torch.optim.SGD without momentum or maximize, "
                    f"got {given}; use SGD(params, lr=...), or algorithm='atc'"
                )

    def before_update(self, context: StepContext, step: int) -> None:
        """Add the momentum to the gradient, and save the parameters before the step."""
        momenta, starts = context.memory("momentum"), context.memory("start")
        tensors = (context.parameters, context.gradients(), momenta, starts)
        for x, g, m, start in zip(*tensors, strict=True):
            g.add_(m, alpha=self.beta)
            start.copy_(x)

    def after_update(self, context: StepContext, step: int) -> None:
        """Mix, and update the momentum by the total change."""
        (round,) = context.rounds(step)
        mix(context, round, step)
        momenta, starts = context.memory("momentum"), context.memory("start")
        tensors = (context.parameters, momenta, starts, context.learning_rates())
        for x, m, start, lr in zip(*tensors, strict=True):
            if lr > 0:  # at a rate of 0, the change is mixing only, and would be divided by 0
                m.mul_(self.mu).add_(start - x, alpha=(1 - self.mu) / lr)
