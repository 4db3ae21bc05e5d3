"""The memory budget of activations, and the memory that a forward pass saves for backward."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gossamer.errors import UserError
from gossamer.memory import free_bytes

_BACKWARD = 2
"""A backward pass needs about as much memory as the forward pass saved, on top of it."""

_KEPT_COPIES = 0.7
"""Soft limit on what a forward pass saves, in copies of all workers' parameters: with the backward
pass activations are 1.4 copies, next to three or more of parameters, gradients and state."""

_SMALL_BYTES = 24 << 20
"""What any simulation may use: less would cost time and save no memory that matters."""


class MemoryBudget(NamedTuple):
    """Memory for the activations of one chunk of workers, in bytes."""

    good: float
    """Soft limit on a chunk of several workers, the same on every machine."""

    most: float
    """Hard limit, the available memory."""


def memory_budget(
    memory_gb: float | None,
    model_bytes: int,
    state_bytes: int,
    *,
    num_workers: int,
    one_model: bool = False,
) -> MemoryBudget:
    """Return the memory left for activations, as a forward pass saves them.

        held = c (2 model + state)            with c = W copies, or 1 where there is one model
        most = (memory - held) / 2            the backward pass needs as much again
        good = max(0.7 W model, (24 MB - held) / 2)

    Activations of one shared model get as much as those of W models: they are of as many samples.

    Args:
        memory_gb: most memory of the simulation; None for what is free.
        model_bytes: one worker's parameters.
        state_bytes: one worker's buffers and optimizer state.
        num_workers: how many there are.
        one_model: whether they share one copy of everything.
    """
    if memory_gb is not None and not (math.isfinite(memory_gb) and memory_gb > 0):
        raise UserError(
            f"memory_gb must be a finite number above 0, got {memory_gb}; "
            "leave it out for what is free"
        )
    given = free_bytes() if memory_gb is None else memory_gb * 1e9
    held = (1 if one_model else num_workers) * (2 * model_bytes + state_bytes)
    most = (given - held) / _BACKWARD
    if most <= 0:
        owner, fewer = (
            ("the model", "") if one_model else (f"{num_workers} workers", "fewer workers, ")
        )
        raise UserError(
            f"parameters, gradients, buffers and optimizer state of {owner} take "
            f"{held / 1e9:.3g} GB, got {given / 1e9:.3g} GB; "
            f"use {fewer}a smaller model, or an optimizer with less state"
        )
    good = max(_KEPT_COPIES * num_workers * model_bytes, (_SMALL_BYTES - held) / _BACKWARD)
    return MemoryBudget(good, most)


@contextmanager
def saved_bytes(given: Iterable[Tensor]) -> Generator[dict[int, int], None, None]:
    """Collect the memory that autograd saves for backward: bytes by address.

    Args:
        given: tensors that exist anyway, and do not count.
    """
    known = {_address(tensor) for tensor in given}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in known:
            saved[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield saved


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
