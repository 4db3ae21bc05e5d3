"""Adapt then combine that also mixes a moment of the optimizer, with a period of its own.

    x_{t+1} = W_t Opt(x_t; g(x_t))
    m ← W_t m                            at every h-th step

1. Optimizer step.
2. Exchange the parameters and mix.
3. At every h-th step exchange an optimizer state, such as Adam's first moment, and mix.

The baseline for whether moments should be exchanged. It did not close Adam's gap on gossip in the
trials of docs/adam.md: second moments are too large on every worker, and so is their mean.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.algorithms.algorithm import Algorithm, StepContext, mix, state_of
from gossamer.errors import UserError


@final
@dataclass(frozen=True)
class MixedMoments(Algorithm):
    """atc that also mixes a state of the optimizer.

    Args:
        moment: its name in the optimizer's state, such as ``"exp_avg"`` or ``"momentum_buffer"``.
        period: steps from one exchange of it to the next, h.
    """

    moment: str = "exp_avg"
    period: int = 1

    name = "mixed_moments"
    tracked = ("moment",)
    scratch = tracked
    reads_optimizer = True

    def __post_init__(self) -> None:
        if self.period < 1:
            raise UserError(
                f"mixed_moments needs a period of at least 1 step, got {self.period}; 1 mixes the "
                "moment at every step"
            )

    @property
    def num_exchanges(self) -> float:
        """One exchange per step, and one more per period."""
        return 1 + 1 / self.period

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise for optimizers without the moment, found by a step of a copy on one number."""
        for optimizer in optimizers:
            trial = copy.copy(optimizer)  # with hooks of its own
            trial.state = defaultdict(dict)
            numbers = [nn.Parameter(torch.zeros(1)) for _ in optimizer.param_groups]
            for number in numbers:
                number.grad = torch.ones(1)
            trial.param_groups = [
                {**group, "params": [number]}
                for group, number in zip(optimizer.param_groups, numbers, strict=True)
            ]
            try:
                trial.step()
            except Exception:  # it cannot run on one number; the first step checks it
                continue
            for number in numbers:
                if state_of([trial], number, self.moment) is None:
                    raise UserError(
                        f"mixed_moments needs an optimizer that keeps {self.moment!r} for every "
                        f"parameter, got {type(optimizer).__name__}, which keeps "
                        f"{', '.join(trial.state[number]) or 'nothing'}; name one that it keeps, "
                        "such as exp_avg of AdamW or momentum_buffer of SGD"
                    )

    def after_update(self, context: StepContext, step: int) -> None:
        """Mix parameters, and at every h-th step the moment."""
        (round,) = context.rounds(step)
        mix(context, round, step)
        if (step + 1) % self.period:
            return
        owned, sent = context.optimizer_state(self.moment), context.memory("moment")
        for own, of_all in zip(owned, sent, strict=True):
            of_all.copy_(own)
        mix(context, round, step, "moment")
        for own, of_all in zip(owned, sent, strict=True):
            own.copy_(of_all)
