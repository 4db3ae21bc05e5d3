"""Adam for small local batches: moments that are committed once per window of steps.

Each worker's gradient is that of a small batch. Its noise inflates the second moment, and a mean of
normalized updates is not the normalized mean: at equal steps Adam with gossip has a higher loss
than with averaged gradients. AccumAdam updates parameters at every step, but its persistent moments
only use the mean gradient of each window of s steps:

    k = ceil(t/s);   b1 = β1^s;   b2 = β2^s
    m~ = b1·m + (1 − b1)·g            v~ = b2·v + (1 − b2)·g²          (this step only)
    x ← x − lr/(1 − b1^k) · m~ / (sqrt(v~)/sqrt(1 − b2^k) + ε)
    c ← c + g/s
    if t % s == 0:   m ← b1·m + (1 − b1)·c;   v ← b2·v + (1 − b2)·c²;   c ← 0

Betas are per step, as Adam's: moments that are committed once in s steps forget s times more
slowly, hence the powers. The paper has them per window, b1 = β1 and b2 = β2, as does
``betas_per="window"``. s = 1 is Adam either way. Everything is elementwise, so the same code works
on one worker's tensors and on stacked ones. Reference: Wang et al., From promise to practice
(https://arxiv.org/abs/2410.11998).
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, Self, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from gossamer.optim.blocks import Tensors
from gossamer.optim.local_adam import LocalAdam, check, enough_beta
from gossamer.optim.window_update import WindowUpdate

Window: TypeAlias = int | Literal["auto"]
BetasPer: TypeAlias = Literal["step", "window"]

_LONGEST_AUTO_WINDOW = 8
"""The paper's at 16 and at 32 workers."""

_FEWEST_WINDOWS = 10
"""Windows that the second moment should average over, 1/(1 − b2). A fraction 1 − b2 of v~ is the
gradient of one step, with the noise that the window should average out."""


def auto_window(num_workers: int) -> int:
    """Return the steps per window of ``window="auto"``: half the workers, from 1 to 8."""
    return min(max(num_workers // 2, 1), _LONGEST_AUTO_WINDOW)


class _AccumAdam(LocalAdam):
    """The common part of both optimizers, which differ in their weight decay."""

    _setting, _number = "window", "a number of steps, such as window=4"
    _auto = staticmethod(auto_window)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        window: Window = "auto",
        betas_per: BetasPer = "step",
    ) -> None:
        super().__init__(params, (lr, betas, eps, weight_decay), window=window, betas_per=betas_per)

    @classmethod
    def like(cls, optimizer: Optimizer, *, window: Window = "auto") -> Self:
        """Return an AccumAdam with the groups, settings and state of torch's Adam or AdamW.

        The moments are shared, not copied: do not step the old optimizer any more. A window opens
        at the next step. Build learning-rate schedulers after this: they hold their optimizer.

        Args:
            optimizer: torch's.
            window: steps per window.
        """
        return cls._like(optimizer, window=window)

    def _check_own(self, group: dict[str, Any]) -> None:
        window, betas_per = group["window"], group["betas_per"]
        is_count = type(window) is int and window >= 1
        check("window", window, is_count or window == "auto", 'an integer >= 1, or "auto"')
        check("betas_per", betas_per, betas_per in ("step", "window"), '"step" or "window"')

    def _warn_of_noise(self, group: dict[str, Any]) -> None:
        window, (_, beta2) = group["window"], window_betas(group)
        if window == 1 or beta2 >= 1 - 1 / _FEWEST_WINDOWS:
            return
        power = window if group["betas_per"] == "step" else 1
        enough = enough_beta(1 / (1 - (1 - 1 / _FEWEST_WINDOWS) ** (1 / power)))
        warnings.warn(
            f"a second moment should average over {_FEWEST_WINDOWS} windows or more, got "
            f"{1 / (1 - beta2):.1f} with beta2 = {group['betas'][1]} per {group['betas_per']} and "
            f"a window of {window}: the noise of single steps outweighs what the window averages; "
            f"use beta2 >= {enough}",
            stacklevel=2,
        )

    def _read_old(self, group: dict[str, Any]) -> None:
        """Betas were per window once; Adam's are per step."""
        group.setdefault("betas_per", "window" if "window" in group else "step")

    def _count_step(self, parameter: Tensor, group: dict[str, Any]) -> int:
        state, window = self.state[parameter], group["window"]
        step = int(state.get("step", 0))
        if window > 1 and "window_mean" not in state:
            step = math.ceil(step / window) * window  # a state of Adam: the first window opens here
        for name in _moments_of(window):
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] = step + 1
        return state["step"]

    def _update(self, parameters: list[Tensor], step: int, group: dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        update = WindowUpdate(
            step=step,
            window=group["window"],
            lr=float(group["lr"]),
            betas=window_betas(group),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.decoupled,
        )
        grads = [p.grad for p in parameters if p.grad is not None]
        moments = ([state[n] for state in states] for n in _moments_of(update.window))
        self._blocks.update_(Tensors(parameters, grads, *moments), update)


@final
class AccumAdam(_AccumAdam):
    """Adam whose moments are committed once per window; weight decay is L2 regularization.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: added to the gradient as weight_decay·x.
        window: steps per window; 1 is Adam. ``"auto"`` is half the number of workers, from 1 to 8,
            which ``decentralize`` and ``Simulation`` know; it stays when workers leave or join.
        betas_per: whether betas are per ``"step"``, as Adam's, or per ``"window"``, as in the
            paper.
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
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        window: Window = "auto",
        betas_per: BetasPer = "step",
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, window=window, betas_per=betas_per)


def _moments_of(window: int) -> tuple[str, ...]:
    """Return the names of a parameter's state tensors; a window of one step has no mean."""
    return ("exp_avg", "exp_avg_sq", *(["window_mean"] if window > 1 else []))


def window_betas(group: dict[str, Any]) -> tuple[float, float]:
    """Return b1 and b2, the decay of a group's moments per window."""
    power = group["window"] if group["betas_per"] == "step" else 1
    beta1, beta2 = group["betas"]
    return beta1**power, beta2**power
