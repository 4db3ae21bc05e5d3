"""Batches of all workers: tensors, tuples or dicts of them, with workers as first dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gossamer.errors import UserError

# torch's pytree takes longer than most functions of one tensor: tensors, and dicts and tuples of
# them, the common cases, do without it.


def each(function: Callable[[Tensor], Tensor], tensors: Any) -> Any:
    """Return a function of every tensor, in the same structure (a tree map)."""
    if isinstance(tensors, Tensor):
        return function(tensors)
    if type(tensors) is dict:
        return {key: each(function, value) for key, value in tensors.items()}
    if type(tensors) is tuple:
        return tuple(each(function, value) for value in tensors)
    return tree_map(function, tensors)


def _leaves(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else tree_leaves(tensors)


def check_workers(tensors: Any, what: str, num_workers: int) -> None:
    """Raise unless every tensor has a row per worker."""
    for leaf in _leaves(tensors):
        shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
        if not isinstance(leaf, Tensor) or not shape or shape[0] != num_workers:
            raise UserError(
                f"{what} must be tensors with {num_workers} workers as their first dimension, "
                f"got {shape}; stack one batch per worker"
            )


def select(tensors: Any, index: int | slice, dtype: torch.dtype) -> Any:
    """Return the rows of some workers, floating-point tensors cast to the given dtype."""

    def row(tensor: Tensor) -> Tensor:
        chosen = tensor[index]
        return chosen.to(dtype) if chosen.is_floating_point() else chosen

    return each(row, tensors)
