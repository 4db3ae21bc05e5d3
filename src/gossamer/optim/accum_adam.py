"""Adam for small local batches: moments that are committed once per window of steps.

With a small batch per worker the second moment is noisy. AccumAdam moves parameters at every step,
but its persistent moments see only the mean gradient of each window of s steps:

    k = ceil(t/s)
    m~ = β1·m + (1 − β1)·g            v~ = β2·v + (1 − β2)·g²          (this step only)
    x ← x − lr/(1 − β1^k) · m~ / (sqrt(v~)/sqrt(1 − β2^k) + ε)
    b ← b + g/s
    if t % s == 0:   m ← β1·m + (1 − β1)·b;   v ← β2·v + (1 − β2)·b²;   b ← 0

s = 1 is Adam. Everything is elementwise, so the same code serves one worker's tensors and stacked
ones. Reference: Wang et al., From promise to practice (https://arxiv.org/abs/2410.11998).
"""

# torch's multi-tensor kernels have no public names; its own optimizers call them by these.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from gossamer.errors import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq", "window_mean")


class _AccumAdam(Optimizer):
    """What both optimizers share; they differ in where weight decay goes."""

    decoupled: bool

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        window: int = 1,
    ) -> None:
        two = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        whole = isinstance(window, int) and window >= 1  # pyright: ignore[reportUnnecessaryIsInstance]
        _check("lr", lr, lr >= 0, "a number >= 0, such as 1e-3")
        _check("betas", betas, two, "two numbers in [0, 1), such as (0.9, 0.999)")
        _check("eps", eps, eps >= 0, "a number >= 0, such as 1e-8")
        _check("weight_decay", weight_decay, weight_decay >= 0, "a number >= 0, such as 0.01")
        _check("window", window, whole, "a whole number of steps >= 1; 1 is Adam")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "window": window,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; see the module's docstring for the update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Parameters that missed a gradient lag behind; those at the same step go together.
            by_step: defaultdict[int, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _check_gradient(parameter.grad)
                    by_step[self._count_step(parameter, group["window"])].append(parameter)
            for step, parameters in by_step.items():
                for together in _launched_together(parameters):
                    self._update(together, step, group)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state, also one of Adam or AdamW, which have no window."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("window", 1)

    def _count_step(self, parameter: Tensor, window: int) -> int:
        state = self.state[parameter]
        names = ("exp_avg", "exp_avg_sq") if window == 1 else _MOMENTS
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] = int(state.get("step", 0)) + 1
        return state["step"]

    def _update(self, parameters: list[Tensor], step: int, group: dict[str, Any]) -> None:
        lr, (beta1, beta2), eps = float(group["lr"]), group["betas"], group["eps"]
        decay, window = group["weight_decay"], group["window"]
        grads = [p.grad for p in parameters if p.grad is not None]
        states = [self.state[p] for p in parameters]
        exp_avgs, exp_avg_sqs, window_means = (
            [state[name] for state in states if name in state] for name in _MOMENTS
        )
        if decay and self.decoupled:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, parameters, alpha=decay))

        def commit(values: list[Tensor]) -> None:
            torch._foreach_lerp_(exp_avgs, values, 1 - beta1)
            torch._foreach_mul_(exp_avg_sqs, beta2)
            torch._foreach_addcmul_(exp_avg_sqs, values, values, 1 - beta2)

        if window == 1:  # what is transient is what is committed
            commit(grads)
            first, second = exp_avgs, exp_avg_sqs
        else:
            first = torch._foreach_lerp(exp_avgs, grads, 1 - beta1)
            second = torch._foreach_mul(exp_avg_sqs, beta2)
            torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
            torch._foreach_add_(window_means, grads, alpha=1 / window)

        k = math.ceil(step / window)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2**k))
        torch._foreach_add_(denominators, eps)
        torch._foreach_addcdiv_(parameters, first, denominators, -lr / (1 - beta1**k))

        if window > 1 and step % window == 0:
            commit(window_means)
            torch._foreach_zero_(window_means)


@final
class AccumAdam(_AccumAdam):
    """Adam whose moments are committed once per window; weight decay is L2 regularization.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of the two moments, per committed window.
        eps: added to the denominator.
        weight_decay: added to the gradient as weight_decay·x.
        window: steps per window; 1 is Adam. The paper uses 8 at 16 workers and 4 at 8.
    """

    decoupled = False


@final
class AccumAdamW(_AccumAdam):
    """AccumAdam with decoupled weight decay: x ← (1 − lr·weight_decay)·x at every step.

    The arguments are AccumAdam's, except that weight_decay is decoupled, and 0.01 as in AdamW.
    """

    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        window: int = 1,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, window=window)


def _launched_together(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Many tensors per kernel launch on a device; one after the other where caches count."""
    on_cpu = parameters[0].device.type == "cpu"
    return [[parameter] for parameter in parameters] if on_cpu else [parameters]


def _check_gradient(gradient: Tensor) -> None:
    if gradient.is_sparse or gradient.is_complex():
        kind = "sparse" if gradient.is_sparse else "complex"
        raise UserError(
            f"AccumAdam takes dense real gradients, got a {kind} one; "
            "use torch.optim.SparseAdam or Adam for that parameter"
        )


def _check(name: str, value: object, valid: bool, required: str) -> None:
    if not valid:
        raise UserError(f"{name} must be {required}, got {value}")
