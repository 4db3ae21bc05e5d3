"""What optimizers for workers' own gradients share: groups as Adam's, and "auto".

Under gossip Adam sees the gradient of one worker's small batch. Optimizers that correct for it have
Adam's settings and a setting of their own, which follows the number of workers whose gradients
all-reduce would average. A subclass names that setting, and takes the step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.optimizer import ParamsT

from gossamer.errors import UserError
from gossamer.optim.window_update import Blocks

_OF_ADAM = ("lr", "betas", "eps", "weight_decay")
_NOT_OFFERED = ("amsgrad", "maximize", "capturable", "differentiable")
_OF_TORCH = (*_NOT_OFFERED, "foreach", "fused", "decoupled_weight_decay")
"""Options of torch's Adam that these optimizers do not have."""

_SETTINGS = {"window": "AccumAdam", "betas_per": "AccumAdam", "smoothing": "SmoothAdam"}
"""Settings beyond Adam's, and whose they are."""


class LocalAdam(Optimizer, ABC):
    """Adam's groups, with a setting that ``"auto"`` derives from the number of workers."""

    decoupled: bool
    """Whether weight decay is AdamW's, or added to the gradient."""

    _setting: str
    """The setting that follows the number of workers."""

    _number: str
    """What may be passed in place of ``"auto"``, with an example."""

    _num_workers: int | None = None

    def __init__(self, params: ParamsT, of_adam: tuple[Any, ...], **own: Any) -> None:
        super().__init__(params, dict(zip(_OF_ADAM, of_adam, strict=True)) | own)
        self._blocks = Blocks()

    @staticmethod
    @abstractmethod
    def _auto(num_workers: int) -> Any:
        """Return the setting for a number of workers."""

    @abstractmethod
    def _count_step(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """Complete a parameter's state, count its step, and return the count."""

    @abstractmethod
    def _update(self, parameters: list[Tensor], step: int, group: dict[str, Any]) -> None:
        """Take a step of parameters of one group that have taken as many."""

    def _check_own(self, group: dict[str, Any]) -> None:
        """Raise on settings beyond Adam's."""

    def _warn_of_noise(self, group: dict[str, Any]) -> None:
        """Warn where the second moment, whose setting is known, is of few values."""

    def _read_old(self, group: dict[str, Any]) -> None:
        """Add to a group what states did not have when they were saved by an older version."""

    @classmethod
    def _like(cls, optimizer: Optimizer, **settings: Any) -> Self:
        if not isinstance(optimizer, Adam):
            raise UserError(
                f"{cls.__name__}.like needs torch's Adam or AdamW, got {type(optimizer).__name__}; "
                f"construct {cls.__name__} from parameters and settings instead"
            )
        defaults = {name: optimizer.defaults[name] for name in _OF_ADAM}
        ours = cls(optimizer.param_groups, **defaults, **settings)
        ours.state.update({p: dict(state) for p, state in optimizer.state.items()})
        return ours

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raise on an option of torch's Adam that would mean something else here."""
        super().add_param_group({**param_group})  # a copy: the dict may belong to another optimizer
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._adopt(group)

    def set_num_workers(self, num_workers: int) -> None:
        """Resolve ``"auto"`` by the number of workers; engines call it.

        A resolved setting does not change when workers leave or join.
        """
        self._num_workers = num_workers
        for group in self.param_groups:
            if group[self._setting] == "auto":
                self._settle(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; the update is in the docstring of the subclass's module."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:  # check all groups before any parameter changes
            self._check_step(group)
        for group in self.param_groups:
            # Parameters that missed gradients have lower step counts; batch those with equal ones.
            by_step: defaultdict[int, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_step[self._count_step(parameter, group)].append(parameter)
            for step, parameters in by_step.items():
                self._update(parameters, step, group)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state; also one of Adam, or of an older version.

        The state's setting is kept; a state of Adam, or with an unresolved one, gets ours. One of
        Adam that would mean something else here raises before anything changes.
        """
        ours = [group[self._setting] for group in getattr(self, "param_groups", ())]
        for i, group in enumerate(state["param_groups"]):
            missing = [name for name in _OF_ADAM if name not in group]
            if missing:
                raise UserError(
                    f"{type(self).__name__} needs a state of its own or of torch's Adam, got one "
                    f"whose groups have no {', '.join(missing)}"
                )
            self._read_old(group)
            if group.get(self._setting, "auto") == "auto":
                group[self._setting] = ours[i] if i < len(ours) else "auto"
            self._check_group(group)
        super().__setstate__(state)
        self._blocks = Blocks()  # deepcopy and pickle go through here, too
        for group in self.param_groups:
            self._adopt(group)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the number of workers, which later groups of a copy need."""
        return {**super().__getstate__(), "_num_workers": self._num_workers}

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise on settings, perhaps of torch's Adam, that would mean something else here."""
        lr, betas, eps, weight_decay = (group[name] for name in _OF_ADAM)
        two = isinstance(betas, Sequence) and len(betas) == 2
        fit = two and all(_is_number(beta) and beta < 1 for beta in betas)
        check("lr", lr, _is_number(lr), "a number >= 0, such as 1e-3")
        check("betas", betas, fit, "two numbers in [0, 1), such as (0.9, 0.999)")
        check("eps", eps, _is_number(eps), "a number >= 0, such as 1e-8")
        check("weight_decay", weight_decay, _is_number(weight_decay), "a number >= 0, such as 0.01")
        self._check_own(group)
        kind = type(self).__name__.removesuffix("W")
        for name, owner in _SETTINGS.items():
            if name in group and owner != kind:
                raise UserError(
                    f"{name} is a setting of {owner}, got it in a group or state of "
                    f"{type(self).__name__}; use {owner}{'W' * self.decoupled}"
                )
        for name in _NOT_OFFERED:
            given = group.get(name)
            check(name, given, not given, f"left out, {kind} does not offer it")
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        if weight_decay and decoupled != self.decoupled:
            ours, other = ("decoupled", kind) if self.decoupled else ("L2", f"{kind}W")
            raise UserError(
                f"weight decay of {type(self).__name__} is {ours}, got a group with "
                f"decoupled_weight_decay={decoupled}; use {other}"
            )

    def _adopt(self, group: dict[str, Any]) -> None:
        """Remove the options of torch's Adam that these optimizers do not have."""
        for name in _OF_TORCH:
            group.pop(name, None)
        group["betas"] = tuple(map(float, group["betas"]))  # torch's may be tensors
        self._settle(group)

    def _settle(self, group: dict[str, Any]) -> None:
        """Resolve a group's setting, if the number of workers is known."""
        if group[self._setting] == "auto" and self._num_workers is not None:
            group[self._setting] = self._auto(self._num_workers)
        if group[self._setting] != "auto":
            self._warn_of_noise(group)

    def _check_step(self, group: dict[str, Any]) -> None:
        """Raise if a group cannot take a step."""
        if group[self._setting] == "auto":
            self._settle(group)  # somebody may have set it again, after a state of other workers
        if group[self._setting] == "auto":
            raise UserError(
                f'{self._setting}="auto" needs the number of workers before the first step, got '
                "none; call gossamer.decentralize() or use gossamer.Simulation, or pass "
                f"{self._number}"
            )
        for parameter in group["params"]:
            gradient: Tensor | None = parameter.grad
            if gradient is not None and (gradient.is_sparse or gradient.is_complex()):
                kind = "sparse" if gradient.is_sparse else "complex"
                raise UserError(
                    f"{type(self).__name__} needs dense real gradients, got a {kind} one; "
                    "use torch.optim.SparseAdam or Adam for that parameter"
                )


def enough_beta(least: float) -> float:
    """Return a beta, rounded up, whose average is over at least so many values, 1/(1 − beta)."""
    digits = math.ceil(math.log10(least)) + 1
    return math.ceil((1 - 1 / least) * 10**digits) / 10**digits


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Tensor) and float(value) >= 0


def check(name: str, value: object, valid: bool, required: str) -> None:
    """Raise unless a setting is valid."""
    if not valid:
        raise UserError(f"{name} must be {required}, got {value}")
