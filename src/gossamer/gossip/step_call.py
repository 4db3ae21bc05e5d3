"""What a hook can find out about the call of ``optimizer.step()`` that it runs in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from gossamer.errors import UserError


def evaluate_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Evaluate the closure of ``optimizer.step(closure)`` now, at unmixed parameters."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        losses = [closure()]

    def evaluated() -> Any:
        if not losses:
            raise UserError(
                "an optimizer must evaluate its closure once per step, got a second call, which "
                "would need gradients at points that other workers do not know; use SGD or Adam"
            )
        return losses.pop()

    if len(args) > 1:
        return (args[0], evaluated, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluated}


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure that ``optimizer.step`` was called with, if any."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def is_scaled() -> bool:
    """Whether a GradScaler calls the step."""
    return any(_scalers())


def refuse_other_scaler() -> None:
    """Raise if torch's own GradScaler calls the step: ranks would skip different steps."""
    for scaler in _scalers():
        if not getattr(scaler, "skips_on_all_ranks", False):
            raise UserError(
                "a GradScaler must skip a step on all ranks or on none, got torch's, which checks "
                "only this rank's gradients; use gossamer.GradScaler(gossip)"
            )


def refuse_inside_backward(algorithm: str) -> None:
    """Raise if a backward pass calls the step: it would continue with changed parameters."""
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
        raise UserError(
            f"{algorithm} acts before the first update, so optimizer.step() must come after the "
            "backward pass, got one inside it (register_post_accumulate_grad_hook), whose other "
            "gradients would be of mixed parameters; use order='atc', which mixes after the last "
            "update"
        )


_HOOKED_STEP = Optimizer.profile_hook_step(lambda self: None).__code__
"""torch's wrapper of every optimizer's step, which calls the hooks."""


def is_nested(optimizer: Optimizer) -> bool:
    """Whether a hook was called by ``super().step()``: torch calls hooks for both classes."""
    calls = (frame.f_locals.get("self") for frame in _callers(_HOOKED_STEP))
    return sum(caller is optimizer for caller in calls) > 1


def _scalers() -> Generator[torch.amp.GradScaler]:
    scalers = (frame.f_locals["self"] for frame in _callers(torch.amp.GradScaler.step.__code__))
    return (scaler for scaler in scalers if scaler.is_enabled())


def _callers(code: CodeType) -> Generator[FrameType]:
    """Yield the frames that run this code, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back
