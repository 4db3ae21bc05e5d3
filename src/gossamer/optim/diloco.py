"""DiLoCo: an outer optimizer on the average of local training.

Workers take H local steps and average, as in local SGD. The difference to their common start,
x₀ − x̄, is the pseudo-gradient of an outer optimizer, SGD with Nesterov momentum:

    Δ = x₀ − x̄;   m ← μ·m + Δ;   x₀ ← x₀ − lr·(Δ + μ·m);   every worker continues from x₀

Every worker has the same average, so each takes the same outer step without communication. An outer
rate of 1 without momentum is local SGD. Reference: Douillard et al.,
https://arxiv.org/abs/2311.08105.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import SGD

from gossamer.errors import UserError


@final
class DiLoCo:
    """The outer step; call ``step()`` after every step of training.

    Needs the complete graph, the algorithm atc and ``every=H``, which leave the average in the
    parameters after each H-th step; otherwise workers would take different outer steps.

    Args:
        parameters: of one worker, or stacked ones of all.
        every: H, steps of training between two outer steps.
        lr: the outer learning rate.
        momentum: the outer Nesterov momentum.
    """

    def __init__(
        self, parameters: Iterable[Tensor], every: int, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        if every < 1:
            raise UserError(f"every must be at least 1 step, got {every}; DiLoCo uses hundreds")
        self._parameters = list(parameters)
        self._start = [parameter.detach().clone() for parameter in self._parameters]
        self._outer = SGD(self._start, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self._every = every
        self._num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Count a step of training; take an outer step after every H-th."""
        self._num_steps += 1
        if self._num_steps % self._every:
            return
        for start, parameter in zip(self._start, self._parameters, strict=True):
            start.grad = start - parameter
        self._outer.step()
        self._outer.zero_grad()
        for start, parameter in zip(self._start, self._parameters, strict=True):
            parameter.copy_(start)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; references, as in torch."""
        return {
            "num_steps": self._num_steps,
            "start": self._start,
            "outer": self._outer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        for start, saved in zip(self._start, state["start"], strict=True):
            start.copy_(saved)
        self._outer.load_state_dict(state["outer"])
        self._num_steps = state["num_steps"]
