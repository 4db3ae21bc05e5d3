"""Push-sum (SGP): workers on any directed graph reach the true mean.

    x ← z w
    x ← Opt(x; g(z))
    x ← P_t x,   w ← P_t w
    z = x / w

1. Multiply the parameters by the weight.
2. Optimizer step, with the gradient at z.
3. Exchange parameters and weight, and mix.
4. Divide the parameters by the weight.

Each worker distributes its parameters and weight among its receivers and itself: columns of P sum
to one, rows need not. So a worker does not need to know its in-degree, and Σ x and Σ w are
conserved; the model computes with z. If weights are doubly stochastic, w stays 1 and this is atc.
Reference: Assran et al. (https://arxiv.org/abs/1811.10792).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import final

from torch import Tensor

from gossamer.algorithms.algorithm import Algorithm, StepContext, mix
from gossamer.errors import UserError
from gossamer.topology import Round, Schedule, pushed


@final
class PushSum(Algorithm):
    """Parameters with a weight: the worker's share of the sum over all workers."""

    name = "push_sum"
    weighted = True
    # Weight sent to a worker that is left out is lost: Σ w shrinks, and effective rates grow.
    needs_all = True

    def adapt_schedule(self, schedule: Schedule) -> Schedule:
        """Return rounds whose columns sum to one; raise for all-reduces, which send no edges."""

        def build(step: int) -> Round:
            round = schedule.round(step)
            if round.reduces.any():
                raise UserError(
                    f"push_sum sends messages along edges, got an all-reduce at step {step} of "
                    f"{schedule.name}; use algorithm='atc', which is the same there"
                )
            return pushed(round)

        return replace(schedule, build=build)

    def before_update(self, context: StepContext, step: int) -> None:
        """Multiply by the weight: from z to x."""
        for x, w in _pairs(context):
            x.mul_(w)

    def after_update(self, context: StepContext, step: int) -> None:
        """Mix with the round of this step, and divide by the weight: from x to z."""
        (round,) = context.rounds(step)
        mix(context, round, step)
        for x, w in _pairs(context):
            x.div_(w)

    def abandon(self, context: StepContext) -> None:
        """Divide by the weight before the failed exchange: from x to z."""
        for x, w in _pairs(context):
            x.div_(w)


def _pairs(context: StepContext) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(context.parameters, context.weights(), strict=True)
