"""Adam for small local batches: a second moment of the gradient's mean over some steps.

Under all-reduce Adam's gradient is the mean of n workers' gradients; under gossip each worker has
only its own, whose noise is n times as large in square, and so is what it adds to the second
moment. SmoothAdam takes the second moment of a moving average s of the worker's gradients, whose
noise, if it is independent from step to step, is reduced as much as by a mean over n workers. The
first moment is Adam's:

    m ← β1·m + (1 − β1)·g           m^ = m/(1 − β1^t)
    s ← a·s + (1 − a)·g             s^ = s/(1 − a^t)            a = (n − 1)/(n + 1)
    v ← max(β2·v + (1 − β2)·s^², (1 − β2)·g²)               v^ = v/(1 − β2^t)
    x ← x − lr · m^ / (sqrt(v^) + ε)

The mean square of the noise of s is (1 − a)/(1 + a) = 1/n of that of g. The maximum bounds a step
as Adam's, because s averages away not only a worker's noise but whatever is brief: a gradient that
is rare and large, or one that changes its sign from step to step on all workers alike
(``benchmarks.noise``). One worker has a = 0, which is Adam. Everything is elementwise, so the same
code works on one worker's tensors and on stacked ones. AccumAdam (``accum_adam``) reduces the noise
of both moments, by windows.
"""

# torch's multi-tensor kernels have no public names; its own optimizers call them by these.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Self, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from gossamer.optim.blocks import Tensors, block_size, by_dtype, cut, decayed_, fused_, move_
from gossamer.optim.local_adam import LocalAdam, check, enough_beta
from gossamer.optim.window_update import WindowUpdate

Smoothing: TypeAlias = float | Literal["auto"]

_MOST_AUTO_SMOOTHING = 0.9
"""That of 19 workers: more would average over gradients of parameters that have changed since."""

_LAST_PLACE = 2.0**-53
"""The least that can be taken from 1 in double precision."""

_FIRST_STEP = torch.tensor(1.0, device="cpu")

_FEWEST_SQUARES = 10
"""Independent squares that the second moment should average over."""


def auto_smoothing(num_workers: int) -> float:
    """Return a of ``smoothing="auto"``: (n − 1)/(n + 1) for n workers, at most 0.9."""
    return min((num_workers - 1) / (num_workers + 1), _MOST_AUTO_SMOOTHING)


class _SmoothAdam(LocalAdam):
    """The common part of both optimizers, which differ in their weight decay."""

    _setting, _number = "smoothing", "a number in [0, 1), such as smoothing=0.8"
    _auto = staticmethod(auto_smoothing)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        smoothing: Smoothing = "auto",
    ) -> None:
        super().__init__(params, (lr, betas, eps, weight_decay), smoothing=smoothing)

    @classmethod
    def like(cls, optimizer: Optimizer, *, smoothing: Smoothing = "auto") -> Self:
        """Return a SmoothAdam with the groups, settings and state of torch's Adam or AdamW.

        The moments are shared, not copied: do not step the old optimizer any more. The average of
        gradients starts at the first moment. Build learning-rate schedulers after this: they hold
        their optimizer.

        Args:
            optimizer: torch's.
            smoothing: the decay rate of the average of gradients.
        """
        return cls._like(optimizer, smoothing=smoothing)

    def _check_own(self, group: dict[str, Any]) -> None:
        smoothing: Any = group["smoothing"]
        number = isinstance(smoothing, Real) and smoothing is not True
        valid = smoothing == "auto" or (number and 0 <= float(smoothing) < 1)
        check("smoothing", smoothing, valid, 'a number in [0, 1), such as 0.8, or "auto"')

    def _warn_of_noise(self, group: dict[str, Any]) -> None:
        squared, beta2 = group["smoothing"] ** 2, group["betas"][1]
        # The square of s decorrelates by a² per step.
        steps_per_square = (1 + squared) / (1 - squared)
        least = _FEWEST_SQUARES * steps_per_square
        if not squared or 1 / (1 - beta2) >= least:
            return
        warnings.warn(
            f"a second moment should average over {_FEWEST_SQUARES} independent squares or more, "
            f"got {1 / (1 - beta2) / steps_per_square:.1f} with beta2 = {beta2} and a smoothing of "
            f"{group['smoothing']:.3g}; use beta2 >= {enough_beta(least)}",
            stacklevel=2,
        )

    def _count_step(self, parameter: Tensor, group: dict[str, Any]) -> int:
        state = self.state[parameter]
        step = int(state.get("step", 0))
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if group["smoothing"] and "smoothed_grad" not in state:
            # Of a state of Adam the first moment is such an average; a new state's is zero.
            weight = (1 - group["smoothing"] ** step) / (1 - group["betas"][0] ** step or 1)
            state["smoothed_grad"] = state["exp_avg"] * weight
        state["step"] = step + 1
        return state["step"]

    def _update(self, parameters: list[Tensor], step: int, group: dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        names = ("exp_avg", "exp_avg_sq", *(["smoothed_grad"] if group["smoothing"] else []))
        grads = [p.grad for p in parameters if p.grad is not None]
        moments = ([state[name] for state in states] for name in names)
        tensors = Tensors(parameters, grads, *moments)
        shared = {name: group[name] for name in ("betas", "eps", "weight_decay")}
        shared |= {"step": step, "lr": float(group["lr"]), "decoupled": self.decoupled}
        if group["smoothing"]:
            update_(tensors, SmoothUpdate(smoothing=group["smoothing"], **shared))
        else:
            self._blocks.update_(tensors, WindowUpdate(window=1, **shared))


@final
class SmoothAdam(_SmoothAdam):
    """Adam with the second moment of a mean over some steps; weight decay is L2 regularization.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: added to the gradient as weight_decay·x.
        smoothing: decay rate of the moving average of gradients whose squares are the second
            moment; 0 is Adam. ``"auto"`` is (n − 1)/(n + 1) for n workers, at most 0.9, which
            ``decentralize`` and ``Simulation`` know; it stays when workers leave or join.
    """

    decoupled = False


@final
class SmoothAdamW(_SmoothAdam):
    """SmoothAdam with decoupled weight decay: x ← (1 − lr·weight_decay)·x at every step.

    The arguments are SmoothAdam's, except that weight_decay is decoupled, and 0.01 as in AdamW.
    """

    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        smoothing: Smoothing = "auto",
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, smoothing=smoothing)


@final
@dataclass(frozen=True, slots=True)
class SmoothUpdate:
    """The scalars of a step."""

    step: int
    """From 1."""

    lr: float
    betas: tuple[float, float]
    smoothing: float
    eps: float
    weight_decay: float
    decoupled: bool


@torch._disable_dynamo  # as torch's own: a compiler cannot trace a kernel that writes in place
def update_(tensors: Tensors, update: SmoothUpdate) -> None:
    """Take a step: in blocks that stay in cache where that can be, by whole lists elsewhere."""
    fitting, others = by_dtype(tensors)
    for dtype, places in fitting.items():
        # The kernel decays L2 weights in the gradient of one moment, and smoothing needs it too.
        l2 = update.weight_decay and not update.decoupled
        take = update_by_lists_ if l2 else _update_by_kernel_
        for block in cut(tensors.at(places), block_size(_wide(dtype))):
            _in_32_bits(take, block, update)
    narrow = [place for place in others if _is_narrow(tensors.parameters[place].dtype)]
    for place in narrow:  # one at a time: copies of all would be larger than the model
        _in_32_bits(update_by_lists_, tensors.at([place]), update)
    if wide := sorted({*others} - {*narrow}):
        update_by_lists_(tensors.at(wide), update)


def update_by_lists_(tensors: Tensors, update: SmoothUpdate) -> None:
    """Take a step by the equations, line by line."""
    parameters, grads, exp_avgs, exp_avg_sqs, grad_means = tensors
    if update.weight_decay:
        grads = decayed_(parameters, grads, update.lr, update.weight_decay, update.decoupled)
    torch._foreach_lerp_(exp_avgs, grads, 1 - update.betas[0])
    _take_second_moment_(grads, exp_avg_sqs, grad_means, update)
    move_(parameters, exp_avgs, exp_avg_sqs, update.step, update.lr, update.betas, update.eps)


def _update_by_kernel_(tensors: Tensors, update: SmoothUpdate) -> None:
    """Take the same step by torch's fused kernel, which takes both moments from one gradient.

    A second beta of 1 − δ, with δ a last place, leaves the second moment as it is computed here: it
    gains δ·g², which is nothing beside the (1 − β2)·g² that it has at least. The kernel's bias
    correction at step 1 divides it by δ; rate, ε and decay make up for that.
    """
    parameters, grads, exp_avgs, exp_avg_sqs, grad_means = tensors
    (beta1, beta2), t = update.betas, update.step
    _take_second_moment_(grads, exp_avg_sqs, grad_means, update)
    scale = math.sqrt((1 - beta2**t) / _LAST_PLACE)
    lr_scale = scale * (1 - beta1) / (1 - beta1**t)
    fused_(
        parameters,
        grads,
        exp_avgs,
        exp_avg_sqs,
        step=_FIRST_STEP,
        lr=update.lr * lr_scale,
        betas=(beta1, 1 - _LAST_PLACE),
        eps=update.eps * scale,
        weight_decay=update.weight_decay / lr_scale,
        decoupled=update.decoupled,
    )


def _take_second_moment_(
    grads: list[Tensor],
    exp_avg_sqs: list[Tensor],
    grad_means: list[Tensor],
    update: SmoothUpdate,
) -> None:
    beta2, smoothing = update.betas[1], update.smoothing
    torch._foreach_lerp_(grad_means, grads, 1 - smoothing)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    weight = (1 - beta2) / (1 - smoothing**update.step) ** 2
    torch._foreach_addcmul_(exp_avg_sqs, grad_means, grad_means, weight)
    squares = torch._foreach_mul(grads, grads)
    torch._foreach_mul_(squares, 1 - beta2)
    torch._foreach_maximum_(exp_avg_sqs, squares)


def _in_32_bits(
    take: Callable[[Tensors, SmoothUpdate], None], tensors: Tensors, update: SmoothUpdate
) -> None:
    """Take a step of 16-bit tensors on copies in 32, because in 16 squares are rounded, or 0.

    What is kept between steps has the dtype of its parameter, as that of torch's Adam: in float16
    a second moment below 6e-8 is 0.
    """
    if not any(_is_narrow(parameter.dtype) for parameter in tensors.parameters):
        take(tensors, update)
        return
    wide = Tensors(*([t.to(_wide(t.dtype)) for t in of_kind] for of_kind in tensors))
    take(wide, update)
    for narrow, computed in zip(tensors, wide, strict=True):
        if narrow is tensors.grads:
            continue
        for kept, new in zip(narrow, computed, strict=True):  # DTensor has no _foreach_copy_
            kept.copy_(new)


def _is_narrow(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).bits < torch.finfo(torch.float32).bits


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that steps are computed in."""
    return torch.float32 if _is_narrow(dtype) else dtype
