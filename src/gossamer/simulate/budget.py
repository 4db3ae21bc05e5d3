"""Memory of activations: what a simulation leaves for them, and what a forward pass keeps."""

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
"""A backward pass holds about as much again as what the forward pass kept."""

_KEPT_COPIES = 0.7
"""What a forward pass should keep at most, in copies of all workers' parameters: with the backward
pass activations are 1.4 copies, beside three or more that are there anyway."""

_SMALL_BYTES = 24 << 20
"""What any simulation may take: less would cost time and save nothing that counts."""


class MemoryBudget(NamedTuple):
    """Memory for the activations of workers that go together, in bytes."""

    good: float
    """What several of them should keep to, whatever the machine has."""

    most: float
    """What there is."""


def memory_budget(
    memory_gb: float | None,
    model_bytes: int,
    state_bytes: int,
    *,
    num_workers: int,
    one_model: bool = False,
) -> MemoryBudget:
    """Return what is left for activations, as a forward pass keeps them.

        held = c (2 model + state)            with c = W copies, or 1 where there is one model
        most = (memory - held) / 2            the backward pass takes as much again
        good = max(0.7 W model, (24 MB - held) / 2)

    One model's activations may take what those of W models may: they are of as many samples.

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
    """Collect the memory that is kept for a backward pass: bytes by address.

    Args:
        given: what is there anyway, and does not count.
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
