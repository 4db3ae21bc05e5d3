"""Passes the number of workers from an engine to optimizers with settings that depend on it.

An optimizer sees one worker's parameters, or all workers' as stacked tensors, and cannot infer it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch.optim import Optimizer

_AnyOptimizer = TypeVar("_AnyOptimizer", bound=Optimizer)


@runtime_checkable
class AsksForWorkers(Protocol):
    """An optimizer with settings that depend on the number of workers."""

    def set_num_workers(self, num_workers: int) -> None:
        """Resolve settings that depend on it; called once, before the first step."""
        ...


def tell_num_workers(optimizer: Optimizer, num_workers: int) -> None:
    """Tell an optimizer how many workers have separate moments; a no-op for most optimizers.

    Args:
        optimizer: any.
        num_workers: the workers that mix; 1 if gradients are averaged, as all moments are equal.
    """
    if isinstance(optimizer, AsksForWorkers):
        optimizer.set_num_workers(num_workers)


def with_num_workers(
    make: Callable[[Any], _AnyOptimizer], num_workers: int
) -> Callable[[Any], _AnyOptimizer]:
    """Return a function that makes the same optimizers, with the number of workers set."""

    def make_and_tell(parameters: Any) -> _AnyOptimizer:
        optimizer = make(parameters)
        tell_num_workers(optimizer, num_workers)
        return optimizer

    return make_and_tell
