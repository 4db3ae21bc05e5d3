"""Exact diffusion and D²: correct each step by the last one's mixing, which removes atc's bias.

    ψ_t = Opt(x_t; g(x_t))
    φ_t = ψ_t + x_t − ψ_{t−1}            (φ_0 = ψ_0)
    x_{t+1} = V φ_t                      V = (I + W)/2 in exact diffusion, W in D²

1. Optimizer step: ψ_t.
2. Add the correction c = x_t − ψ_{t−1}.
3. Exchange and mix; the next correction is x_{t+1} − ψ_t.

With D² that is x_{t+1} = W (2x_t − x_{t−1} − η g_t + η g_{t−1}). One exchange per step, always with
the same round, of symmetric weights; D² needs λ_min(W) > −1/3. References: Yuan et al.
(https://arxiv.org/abs/1702.05122), Tang et al. (https://arxiv.org/abs/1803.07068).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import final

from torch.optim import SGD, Optimizer

from gossamer.algorithms.algorithm import Algorithm, StepContext, mix
from gossamer.errors import UserError
from gossamer.topology import Round, Schedule, damped, static
from gossamer.topology.spectrum import smallest_eigenvalue

_LEAST_EIGENVALUE = -1 / 3


class _Corrected(Algorithm):
    """The common base; subclasses derive V from the schedule's round."""

    kept = ("correction",)
    needs_all = True  # corrections sum to zero over all workers only; over some the mean drifts

    def adapt_schedule(self, schedule: Schedule) -> Schedule:
        """Raise for rounds that change from step to step, or are not symmetric."""
        round = schedule.round(0)
        if schedule.period != 1 or not round.symmetric:
            kind = "one that is not symmetric" if schedule.period == 1 else "rounds that change"
            raise UserError(
                f"{self.name} needs the same round at every step, with symmetric weights, got "
                f"{kind} from {schedule.name}; use 'ring' or 'torus', or "
                "algorithm='gradient_tracking'"
            )
        return replace(static(self._round(round)), name=schedule.name)

    def _round(self, round: Round) -> Round:
        raise NotImplementedError

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise for other optimizers than SGD: the correction is derived for gradient steps."""
        for optimizer in optimizers:
            if not isinstance(optimizer, SGD):
                raise UserError(
                    f"{self.name} corrects steps of torch.optim.SGD, got "
                    f"{type(optimizer).__name__}; use algorithm='gradient_tracking', which works "
                    "with any optimizer"
                )

    def after_update(self, context: StepContext, step: int) -> None:
        """Correct, mix, and keep the next correction."""
        corrections = context.memory("correction")
        for x, c in zip(context.parameters, corrections, strict=True):
            x.add_(c)
            c.sub_(x).neg_()  # ψ_t = φ_t − c
        (round,) = context.rounds(step)
        mix(context, round, step)
        for x, c in zip(context.parameters, corrections, strict=True):
            c.sub_(x).neg_()  # x_{t+1} − ψ_t


@final
class ExactDiffusion(_Corrected):
    """Exact diffusion, with (I + W)/2."""

    name = "exact_diffusion"

    def _round(self, round: Round) -> Round:
        if round.reduces.any():
            raise UserError(
                "exact_diffusion mixes with (I + W)/2, which is not an all-reduce even if W is, "
                "got a round that averages in groups; use algorithm='d2', which mixes with W itself"
            )
        return damped(round, 0.5)


@final
class D2(_Corrected):
    """D², with W itself."""

    name = "d2"

    def _round(self, round: Round) -> Round:
        smallest = smallest_eigenvalue(round)
        if smallest <= _LEAST_EIGENVALUE:
            raise UserError(
                f"d2 needs weights whose smallest eigenvalue is above -1/3, got {smallest:.3f}; "
                "use algorithm='exact_diffusion', which allows any, or topology.damped(round, 0.5)"
            )
        return round
