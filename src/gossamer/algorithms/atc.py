"""Adapt then combine: parameters are mixed after the update, and the step waits for the exchange.

    x_{t+1} = W_t Opt(x_t; g(x_t))

1. Optimizer step.
2. Exchange and mix, ``gossip_steps`` times.

On the complete graph with SGD this is all-reduce of gradients. Reference: Lian et al.
(https://arxiv.org/abs/1705.09056).
"""

from __future__ import annotations

from typing import final

from gossamer.algorithms.algorithm import Algorithm, StepContext, mix


@final
class AdaptThenCombine(Algorithm):
    """Decentralized training that mixes updated parameters."""

    name = "atc"
    plain = True
    repeats = True

    def after_update(self, context: StepContext, step: int) -> None:
        """Mix with the rounds of this step."""
        for round in context.rounds(step):
            mix(context, round, step)
