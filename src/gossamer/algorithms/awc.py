"""Adapt while combine: parameters are exchanged while the next gradient is computed.

    x_{t+1} = Opt(W_t x_t; g(x_t))

1. Finish the exchange of x_t, and mix.
2. Optimizer step.
3. Start the exchange of x_{t+1}.

The gradient was taken at the unmixed parameters. All workers start equal, so step 0 has nothing to
mix. Reference: Wang et al., From promise to practice (https://arxiv.org/abs/2410.11998).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from gossamer.algorithms.algorithm import Algorithm, StepContext
from gossamer.topology import Round


@final
class AdaptWhileCombine(Algorithm):
    """Decentralized training that overlaps its exchange with the next step's computation."""

    name = "awc"
    overlaps = True
    plain = True

    def before_update(self, context: StepContext, step: int) -> None:
        """Mix x_t."""
        context.finish()

    def after_update(self, context: StepContext, step: int) -> None:
        """Start the exchange of x_{t+1}."""
        self._start(context, context.rounds(step + 1), step + 1)

    def resume(self, context: StepContext, step: int) -> None:
        """Restart the exchange that was in flight."""
        self._start(context, context.resumed_rounds(step), step)

    def _start(self, context: StepContext, rounds: Sequence[Round], step: int) -> None:
        (round,) = rounds  # the exchange is in flight during the gradient: no second one can follow
        context.start(round, step)
