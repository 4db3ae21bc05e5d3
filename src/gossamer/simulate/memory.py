"""How much memory a simulation may take, and what is left of it for activations."""

from __future__ import annotations

import math
from pathlib import Path

from gossamer.errors import UserError

_BACKWARD = 2
"""A backward pass holds about as much again as what the forward pass kept."""

_LEAST_BYTES = 16 << 20
"""Smaller chunks cost time and save nothing that counts."""


def chunk_bytes(
    memory_gb: float | None, model_bytes: int, state_bytes: int, num_workers: int
) -> float:
    """Return what the activations of workers that go together may take, in bytes.

    Args:
        memory_gb: most memory of the simulation; None for what is free.
        model_bytes: one worker's parameters.
        state_bytes: one worker's buffers and optimizer state.
        num_workers: how many there are.
    """
    if memory_gb is not None and not (math.isfinite(memory_gb) and memory_gb > 0):
        raise UserError(
            f"memory_gb must be a finite number above 0, got {memory_gb}; "
            "leave it out for what is free"
        )
    given = free_bytes() if memory_gb is None else memory_gb * 1e9
    stacked = num_workers * (2 * model_bytes + state_bytes)
    left = given - stacked
    if left <= 0:
        raise UserError(
            f"parameters, gradients and optimizer state of {num_workers} workers take "
            f"{stacked / 1e9:.3g} GB, got {given / 1e9:.3g} GB; "
            "use fewer workers, a smaller model, or an optimizer with less state"
        )
    # So that activations stay a small part of what there is of parameters, gradients and state.
    return min(left / _BACKWARD, max(_LEAST_BYTES, num_workers * model_bytes / 2))


def free_bytes() -> float:
    """Return the memory that a process can take without swapping; infinite where it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    available = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return 1024 * float(next(available, math.inf))
