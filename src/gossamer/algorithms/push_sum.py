"""Push-sum (SGP): workers on any directed graph come to the true mean.

    x ← z w
    x ← Opt(x; g(z))
    x ← P_t x,   w ← P_t w
    z = x / w

1. Take the weight into the parameters.
2. Optimizer step, with the gradient at z.
3. Exchange parameters and weight, and mix.
4. Take the weight out again.

Each worker shares out all that it has: columns of P sum to one, rows need not. So nobody has to
know how many send to it, and Σ x and Σ w stay; z is what a model computes with. Where a graph's
weights are doubly stochastic, w stays 1 and this is atc. Reference: Assran et al.
(https://arxiv.org/abs/1811.10792).
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
    """Parameters that carry a weight, which says how much of the sum a worker has."""

    name = "push_sum"
    weighted = True
    needs_all = True  # the weight of one who is left out is lost, and others' rates grow by it

    def adapt_schedule(self, schedule: Schedule) -> Schedule:
        """Let every worker share out all that it has; refuse all-reduces, which nobody pushes."""

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
        """From z to x."""
        for x, w in _pairs(context):
            x.mul_(w)

    def after_update(self, context: StepContext, step: int) -> None:
        """Mix with the round of this step, and go from x to z."""
        (round,) = context.rounds(step)
        mix(context, round, step)
        for x, w in _pairs(context):
            x.div_(w)

    def abandon(self, context: StepContext) -> None:
        """From x to z, with the weight as it was."""
        for x, w in _pairs(context):
            x.div_(w)


def _pairs(context: StepContext) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(context.parameters, context.weights(), strict=True)
