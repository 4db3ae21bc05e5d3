"""Gradient tracking: every worker tracks the mean gradient of all workers, whatever data it has.

    y ← W_t (y + g(x_t) − g(x_{t−1}))
    x_{t+1} = W_t (x_t − η y)

1. Add the change of the gradient to the tracker, exchange it and mix.
2. Optimizer step, with the tracker in place of the gradient.
3. Exchange the parameters and mix.

The mean of all trackers always equals the mean of all gradients, so a constant learning rate
reaches the optimum of the mean loss also if workers' data differ. Two exchanges per step. Not
overlapped: the overlapped form diverged on a one-peer ring. References: Di Lorenzo and Scutari
(https://arxiv.org/abs/1602.00591), Nedic et al. (https://arxiv.org/abs/1607.03218).
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

from gossamer.algorithms.algorithm import Algorithm, StepContext, mix
from gossamer.errors import UserError
from gossamer.topology import Round, Schedule


@final
class GradientTracking(Algorithm):
    """A tracker of the mean gradient, which replaces the gradient of any optimizer."""

    name = "gradient_tracking"
    tracked = ("tracker",)
    kept = ("last_gradient",)
    # Without one worker's tracker, the mean of the others is not that of their gradients.
    needs_all = True

    def adapt_schedule(self, schedule: Schedule) -> Schedule:
        """Raise for rounds that move the mean: trackers would not sum to the gradients any more."""

        def build(step: int) -> Round:
            round = schedule.round(step)
            if not round.conserves_mean:
                raise UserError(
                    "gradient_tracking needs rounds that conserve the mean, got another at step "
                    f"{step} of {schedule.name}; use weights=metropolis, or algorithm='push_sum'"
                )
            return round

        return replace(schedule, build=build)

    def before_update(self, context: StepContext, step: int) -> None:
        """Update and mix the tracker, and copy it over the gradient."""
        gradients, trackers = context.gradients(), context.memory("tracker")
        last = context.memory("last_gradient")
        for y, g, g_last in zip(trackers, gradients, last, strict=True):
            y.add_(g).sub_(g_last)
            g_last.copy_(g)
        (round,) = context.rounds(step)
        mix(context, round, step, "tracker")
        # Copied, not assigned: the optimizer updates from the gradient tensors themselves.
        for y, g in zip(trackers, gradients, strict=True):
            g.copy_(y)

    def after_update(self, context: StepContext, step: int) -> None:
        """Mix with the round of this step."""
        (round,) = context.rounds(step)
        mix(context, round, step)
