"""One step of AccumAdam on lists of tensors: a reference version, and one in cache-sized blocks.

The equations are in ``accum_adam``. ``update_by_lists_`` is a transcription, line by line, and runs
on accelerators. On a CPU each of its lines is a pass over memory; ``Blocks`` makes one pass. Within
a window this step's moments are transient, so a block of m and v is copied to a scratch buffer in
cache, torch's fused Adam steps on the copies, and the copies are discarded.
"""

# torch's multi-tensor kernels have no public names; its own optimizers call them by these.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from gossamer.optim.blocks import Tensors, block_size, by_dtype, cut, decayed_, fused_, move_

_MOST_SHAPES = 1024
"""Bounds the cache of blocks' views, which would grow without limit where the set of parameters
with gradients keeps changing."""


@final
@dataclass(frozen=True, slots=True)
class WindowUpdate:
    """The scalars of a step."""

    step: int
    """From 1."""

    window: int
    lr: float
    betas: tuple[float, float]
    """Per window."""

    eps: float
    weight_decay: float
    decoupled: bool

    @property
    def num_windows(self) -> int:
        """Windows so far, including that of this step."""
        return math.ceil(self.step / self.window)

    @property
    def ends_window(self) -> bool:
        """Whether moments are committed after this step."""
        return self.step % self.window == 0


def update_by_lists_(tensors: Tensors, update: WindowUpdate) -> None:
    """Take a step by the equations, line by line."""
    parameters, grads, exp_avgs, exp_avg_sqs, grad_means = tensors
    beta1, beta2 = update.betas
    if update.weight_decay:
        grads = decayed_(parameters, grads, update.lr, update.weight_decay, update.decoupled)
    if update.window == 1:  # in a window of one step the transient moments are committed
        _commit_(exp_avgs, exp_avg_sqs, grads, update)
        first, second = exp_avgs, exp_avg_sqs
    else:
        first = torch._foreach_lerp(exp_avgs, grads, 1 - beta1)
        second = torch._foreach_mul(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        torch._foreach_add_(grad_means, grads, alpha=1 / update.window)

    move_(parameters, first, second, update.num_windows, update.lr, update.betas, update.eps)
    if update.window > 1 and update.ends_window:
        _commit_(exp_avgs, exp_avg_sqs, grad_means, update)
        torch._foreach_zero_(grad_means)


@final
class Blocks:
    """Takes the same step, up to rounding, block by block where torch's fused kernel can.

    Owns the scratch memory, which must not be shared: optimizers may step in different threads.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[object, ...], _Copies] = {}
        self._memory: dict[tuple[torch.dtype, int], Tensor] = {}

    @torch._disable_dynamo  # as torch's own: a compiler cannot trace a kernel that writes in place
    def update_(self, tensors: Tensors, update: WindowUpdate) -> None:
        """Take a step."""
        fitting, others = by_dtype(tensors)
        # Once for all blocks; as for all memory here, whatever the default device is.
        count = torch.tensor(float(update.num_windows), device="cpu")
        for places in fitting.values():
            if update.window == 1:
                _fused_(tensors.at(places), update, update.weight_decay, count)
            else:
                self._update_transiently_(tensors.at(places), update, count)
        if others:
            update_by_lists_(tensors.at(others), update)

    def _update_transiently_(self, tensors: Tensors, update: WindowUpdate, count: Tensor) -> None:
        dtype = tensors.parameters[0].dtype
        most = block_size(dtype)
        decoupled = update.weight_decay if update.decoupled else 0.0
        for parameters, grads, exp_avgs, exp_avg_sqs, grad_means in cut(tensors, most):
            copies = self._copies_of(parameters, dtype, most)
            if update.weight_decay and not update.decoupled:
                torch._foreach_copy_(copies.grads, grads)
                torch._foreach_add_(copies.grads, parameters, alpha=update.weight_decay)
                grads = copies.grads
            torch._foreach_copy_(copies.moments, [*exp_avgs, *exp_avg_sqs])
            transient = Tensors(parameters, grads, copies.exp_avgs, copies.exp_avg_sqs)
            _fused_(transient, update, decoupled, count)
            torch._foreach_add_(grad_means, grads, alpha=1 / update.window)
            if update.ends_window:
                _commit_(exp_avgs, exp_avg_sqs, grad_means, update)
                torch._foreach_zero_(grad_means)

    def _copies_of(self, tensors: list[Tensor], dtype: torch.dtype, most: int) -> _Copies:
        """Return scratch memory in the shapes of a block; cached, as every step needs the same."""
        shapes = tuple([tensor.shape for tensor in tensors])
        key = (dtype, most, shapes)
        if key not in self._copies:
            if len(self._copies) >= _MOST_SHAPES:
                self._copies.clear()
            if (dtype, most) not in self._memory:
                self._memory[dtype, most] = torch.empty(3, most, dtype=dtype, device="cpu")
            rows = self._memory[dtype, most]
            sizes = [shape.numel() for shape in shapes]
            kinds = [
                [flat.view(shape) for flat, shape in zip(row.split(sizes), shapes, strict=True)]
                for row in rows[:, : sum(sizes)]
            ]
            self._copies[key] = _Copies(kinds[0], kinds[1], [*kinds[0], *kinds[1]], kinds[2])
        return self._copies[key]


class _Copies(NamedTuple):
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    moments: list[Tensor]
    """Both of them."""

    grads: list[Tensor]
    """For gradients with the weights' decay."""


def _fused_(tensors: Tensors, update: WindowUpdate, weight_decay: float, count: Tensor) -> None:
    fused_(
        *tensors[:4],
        step=count,
        lr=update.lr,
        betas=update.betas,
        eps=update.eps,
        weight_decay=weight_decay,
        decoupled=update.decoupled,
    )


def _commit_(
    exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], values: list[Tensor], update: WindowUpdate
) -> None:
    beta1, beta2 = update.betas
    torch._foreach_lerp_(exp_avgs, values, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, values, values, 1 - beta2)
