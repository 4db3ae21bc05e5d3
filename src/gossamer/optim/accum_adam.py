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
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, Self, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.optimizer import ParamsT

from gossamer.errors import UserError
from gossamer.optim.window_update import Blocks, Tensors, WindowUpdate

Window: TypeAlias = int | Literal["auto"]
BetasPer: TypeAlias = Literal["step", "window"]

_LONGEST_AUTO_WINDOW = 8
"""The paper's at 16 and at 32 workers."""

_FEWEST_WINDOWS = 10
"""Windows that the second moment should average over, 1/(1 − b2). A fraction 1 − b2 of v~ is the
gradient of one step, with the noise that the window should average out."""

_NOT_OFFERED = ("amsgrad", "maximize", "capturable", "differentiable")
_OF_TORCH = (*_NOT_OFFERED, "foreach", "fused", "decoupled_weight_decay")
"""Options of torch's Adam that AccumAdam does not have."""


def auto_window(num_workers: int) -> int:
    """Return the steps per window of ``window="auto"``: half the workers, from 1 to 8."""
    return min(max(num_workers // 2, 1), _LONGEST_AUTO_WINDOW)


class _AccumAdam(Optimizer):
    """The common part of both optimizers, which differ in their weight decay."""

    decoupled: bool
    _num_workers: int | None = None

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "window": window,
            "betas_per": betas_per,
        }
        super().__init__(params, defaults)
        self._blocks = Blocks()

    @classmethod
    def like(cls, optimizer: Optimizer, *, window: Window = "auto") -> Self:
        """Return an AccumAdam with the groups, settings and state of torch's Adam or AdamW.

        The moments are shared, not copied: do not step the old optimizer any more. A window opens
        at the next step. Build learning-rate schedulers after this: they hold their optimizer.

        Args:
            optimizer: torch's.
            window: steps per window.
        """
        if not isinstance(optimizer, Adam):
            raise UserError(
                f"{cls.__name__}.like needs torch's Adam or AdamW, got {type(optimizer).__name__}; "
                f"construct {cls.__name__} from parameters and settings instead"
            )
        names = ("lr", "betas", "eps", "weight_decay")
        defaults = {name: optimizer.defaults[name] for name in names}
        ours = cls(optimizer.param_groups, **defaults, window=window)
        ours.state.update({p: dict(state) for p, state in optimizer.state.items()})
        return ours

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raise on an option of torch's Adam that would mean something else here."""
        super().add_param_group({**param_group})  # a copy: the dict may belong to another optimizer
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except UserError:
            self.param_groups.pop()
            raise
        self._adopt(group)

    def set_num_workers(self, num_workers: int) -> None:
        """Resolve ``window="auto"`` by the number of workers; engines call it.

        A resolved window does not change when workers leave or join.
        """
        self._num_workers = num_workers
        for group in self.param_groups:
            if group["window"] == "auto":
                self._settle(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise on settings, perhaps of torch's Adam, that would mean something else here."""
        _check_settings(group)
        self._check_decay(group)

    def _adopt(self, group: dict[str, Any]) -> None:
        """Remove the options of torch's Adam that AccumAdam does not have."""
        for name in _OF_TORCH:
            group.pop(name, None)
        self._settle(group)

    def _settle(self, group: dict[str, Any]) -> None:
        """Resolve a group's window, if the number of workers is known."""
        if group["window"] == "auto" and self._num_workers is not None:
            group["window"] = auto_window(self._num_workers)
        if group["window"] != "auto":
            _warn_of_noise(group)

    def _check_decay(self, group: dict[str, Any]) -> None:
        """Raise on a group of torch's with the other kind of weight decay."""
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        if group["weight_decay"] and decoupled != self.decoupled:
            ours, other = ("decoupled", "AccumAdam") if self.decoupled else ("L2", "AccumAdamW")
            raise UserError(
                f"weight decay of {type(self).__name__} is {ours}, got a group with "
                f"decoupled_weight_decay={decoupled}; use {other}"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; see the module's docstring for the update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:  # check all groups before any parameter changes
            _check_step(group)
        for group in self.param_groups:
            # Parameters that missed gradients have lower step counts; batch those with equal ones.
            by_step: defaultdict[int, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_step[self._count_step(parameter, group["window"])].append(parameter)
            for step, parameters in by_step.items():
                self._update(parameters, step, group)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state; also one of Adam, or an old one, whose betas are per window.

        The state's window is kept; a state of Adam, or with an unresolved window, gets ours. One of
        Adam that would mean something else here raises before anything changes.
        """
        ours = [group["window"] for group in getattr(self, "param_groups", ())]
        for i, group in enumerate(state["param_groups"]):
            group.setdefault("betas_per", "window" if "window" in group else "step")
            if group.get("window", "auto") == "auto":
                group["window"] = ours[i] if i < len(ours) else "auto"
            self._check_group(group)
        super().__setstate__(state)
        self._blocks = Blocks()  # deepcopy and pickle go through here, too
        for group in self.param_groups:
            self._adopt(group)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the number of workers, which later groups of a copy need."""
        return {**super().__getstate__(), "_num_workers": self._num_workers}

    def _count_step(self, parameter: Tensor, window: int) -> int:
        state = self.state[parameter]
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


def _check_step(group: dict[str, Any]) -> None:
    """Raise if a group cannot take a step."""
    if group["window"] == "auto":
        raise UserError(
            'window="auto" needs the number of workers before the first step, got none; call '
            "gossamer.decentralize() or use gossamer.Simulation, or pass a number of steps, such "
            "as window=4"
        )
    for parameter in group["params"]:
        gradient: Tensor | None = parameter.grad
        if gradient is not None and (gradient.is_sparse or gradient.is_complex()):
            kind = "sparse" if gradient.is_sparse else "complex"
            raise UserError(
                f"AccumAdam needs dense real gradients, got a {kind} one; "
                "use torch.optim.SparseAdam or Adam for that parameter"
            )


def window_betas(group: dict[str, Any]) -> tuple[float, float]:
    """Return b1 and b2, the decay of a group's moments per window."""
    power = group["window"] if group["betas_per"] == "step" else 1
    beta1, beta2 = group["betas"]
    return beta1**power, beta2**power


def _warn_of_noise(group: dict[str, Any]) -> None:
    window, (_, beta2) = group["window"], window_betas(group)
    if window == 1 or beta2 >= 1 - 1 / _FEWEST_WINDOWS:
        return
    power = window if group["betas_per"] == "step" else 1
    enough = math.ceil(1000 * (1 - 1 / _FEWEST_WINDOWS) ** (1 / power)) / 1000
    warnings.warn(
        f"a second moment should average over {_FEWEST_WINDOWS} windows or more, got "
        f"{1 / (1 - beta2):.1f} with beta2 = {group['betas'][1]} per {group['betas_per']} and a "
        f"window of {window}: the noise of single steps outweighs what the window averages; use "
        f"beta2 >= {enough:g}",
        stacklevel=2,
    )


def _check_settings(group: dict[str, Any]) -> None:
    lr, betas, eps, weight_decay = (group[n] for n in ("lr", "betas", "eps", "weight_decay"))
    window, betas_per = group["window"], group["betas_per"]
    two = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
    is_count = type(window) is int and window >= 1
    _check("lr", lr, lr >= 0, "a number >= 0, such as 1e-3")
    _check("betas", betas, two, "two numbers in [0, 1), such as (0.9, 0.999)")
    _check("eps", eps, eps >= 0, "a number >= 0, such as 1e-8")
    _check("weight_decay", weight_decay, weight_decay >= 0, "a number >= 0, such as 0.01")
    _check("window", window, is_count or window == "auto", 'an integer >= 1, or "auto"')
    _check("betas_per", betas_per, betas_per in ("step", "window"), '"step" or "window"')
    for name in _NOT_OFFERED:
        _check(name, group.get(name), not group.get(name), "left out, AccumAdam does not offer it")


def _check(name: str, value: object, valid: bool, required: str) -> None:
    if not valid:
        raise UserError(f"{name} must be {required}, got {value}")
