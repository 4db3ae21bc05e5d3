"""The optimizer step of all workers.

Most optimizers are elementwise. On stacked tensors [W, ...] one such optimizer equals W of them.
One that depends on a whole tensor (its norm, its rows) does not, nor does one whose factory depends
on the shapes of parameters (a 1-D rule for biases); then each worker gets its own. Which case it is
is found by trial.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gossamer.algorithms import rates_of
from gossamer.errors import UserError

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]

_TRIAL_SCALES = tuple(
    (10.0**own, 10.0**other)
    for own, other in ((0, 0), (-3, 3), (6, -3), (0, 6), (3, -3), (-3, 0), (1, 2), (0, 0))
)
"""Scales of two workers' gradients, step by step: a threshold on a norm between them, such as
clipping, triggers at another step for the stacked tensor than for each worker."""


class Update(Protocol):
    """The optimizer step of all workers."""

    optimizer: Optimizer
    """The optimizer whose hyperparameters apply to all, for learning-rate schedulers."""

    def step(self) -> None:
        """Step all workers from the stacked gradients."""
        ...

    def learning_rates(self) -> list[float]:
        """Return the rate of each stacked parameter, in their order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all workers' optimizers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        ...


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer is given, by name."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise UserError(
            "the model must have trainable parameters, got none; set requires_grad on some"
        )
    return trained


def make_update(make: MakeOptimizer, stacked: list[nn.Parameter], elementwise: bool) -> Update:
    """Return one optimizer on stacked parameters if it is elementwise, else one per worker."""
    if elementwise:
        return StackedUpdate(build(make, stacked), stacked)
    return PerWorkerUpdate(make, stacked)


def state_bytes(make: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> int:
    """Return the memory of an optimizer's state after a step on tensors of these shapes."""
    own = [nn.Parameter(torch.ones_like(p)) for p in parameters]
    optimizer = build(make, own)
    _step(optimizer, own, [torch.ones_like(p) for p in own])
    held = (s for of_one in optimizer.state.values() for s in of_one.values())
    return sum(s.nbytes for s in held if isinstance(s, Tensor))


def is_elementwise(make: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether one optimizer on stacked tensors equals one per worker, by trial.

    Two workers with random parameters take a few steps, stacked and separately, in float64, with
    gradients of many scales, so that clipping by a global norm shows.

    Args:
        make: builds a torch optimizer from a list of parameters.
        parameters: one worker's, for their shapes.
    """
    generator = torch.Generator().manual_seed(0)

    def random(like: Tensor) -> Tensor:
        numbers = torch.randn(2, *like.shape, generator=generator, dtype=torch.float64)
        return numbers.to(like.device)

    stacked = [nn.Parameter(random(p)) for p in parameters]
    apart = [[nn.Parameter(p.detach()[i].clone()) for p in stacked] for i in range(2)]
    optimizers = [build(make, own) for own in apart]
    try:
        together = build(make, stacked)
    except Exception:  # an optimizer may raise anything on these shapes
        return False
    for scales in _TRIAL_SCALES:
        grads = [random(p[0]) for p in stacked]
        for grad in grads:
            grad.mul_(grad.new_tensor(scales).view(2, *[1] * (grad.dim() - 1)))
        for i, own in enumerate(apart):
            _step(optimizers[i], own, [grad[i].clone() for grad in grads])
        if not _agrees(together, stacked, apart, grads):
            return False
    return True


@final
class StackedUpdate:
    """One optimizer on stacked parameters."""

    def __init__(self, optimizer: Optimizer, stacked: list[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self._stacked = stacked

    def step(self) -> None:
        """Step all workers from the stacked gradients."""
        self.optimizer.step()

    def learning_rates(self) -> list[float]:
        """Return the rate of each stacked parameter, in their order."""
        return rates_of([self.optimizer], self._stacked)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.optimizer.load_state_dict(state)


@final
class PerWorkerUpdate:
    """An optimizer per worker, on views of stacked parameters.

    External changes of the first one's param groups (a scheduler's) are copied to all; values that
    an optimizer itself writes into its groups stay its own.
    """

    def __init__(self, make: MakeOptimizer, stacked: list[nn.Parameter]) -> None:
        self._stacked = stacked
        # A slice of a parameter's data is a new leaf that aliases its memory.
        self._own = [
            [nn.Parameter(p.detach()[i]) for p in stacked] for i in range(stacked[0].shape[0])
        ]
        self._optimizers = [build(make, own) for own in self._own]
        self.optimizer = self._optimizers[0]
        self._known = self._settings()
        """The first one's settings after its last step; a difference to them is external."""

    def step(self) -> None:
        """Step all workers from the stacked gradients."""
        self._share_changes()
        for i, (own, optimizer) in enumerate(zip(self._own, self._optimizers, strict=True)):
            for p, q in zip(own, self._stacked, strict=True):
                p.grad = None if q.grad is None else q.grad[i]
            optimizer.step()
        self._known = self._settings()

    def learning_rates(self) -> list[float]:
        """Return the rate of each stacked parameter, in their order."""
        return rates_of([self.optimizer], self._own[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers."""
        self._share_changes()
        return {"workers": [optimizer.state_dict() for optimizer in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        for optimizer, own in zip(self._optimizers, state["workers"], strict=True):
            optimizer.load_state_dict(own)
        self._known = self._settings()

    def _settings(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        return [
            copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in groups
        ]

    def _share_changes(self) -> None:
        """Give all workers what a user or a scheduler has changed since the last step."""
        now = self._settings()
        for i, (new, known) in enumerate(zip(now, self._known, strict=True)):
            changed = {k: v for k, v in new.items() if k not in known or _differ(v, known[k])}
            for optimizer in self._optimizers[1:]:
                optimizer.param_groups[i].update(copy.deepcopy(changed))
        self._known = now


def build(make: MakeOptimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer of these parameters, after checks."""
    optimizer = make(parameters)
    known = {id(p) for p in parameters}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(id(p) not in known for p in held)
    if strangers or not held:
        raise UserError(
            "the optimizer must hold the parameters that its function is given, got "
            f"{len(held) - strangers} of them and {strangers} others; pass a function such as "
            "lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    if isinstance(optimizer, LBFGS):
        raise UserError(
            "an optimizer must take one gradient per step, got LBFGS, which evaluates the loss "
            "several times; use SGD or Adam"
        )
    return optimizer


def _step(optimizer: Optimizer, parameters: list[nn.Parameter], grads: list[Tensor]) -> None:
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return not torch.equal(a, b)
    return bool(a != b)


def _agrees(
    together: Optimizer,
    stacked: list[nn.Parameter],
    apart: list[list[nn.Parameter]],
    grads: list[Tensor],
) -> bool:
    """Step all workers stacked; return whether the result equals that of separate steps."""
    try:
        _step(together, stacked, grads)
    except Exception:  # as at construction
        return False
    pairs = zip(stacked, *apart, strict=True)
    return all(torch.allclose(p, torch.stack(own), rtol=1e-9, atol=1e-12) for p, *own in pairs)
