"""How much memory a simulation may take, and what is left of it for activations."""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path
from typing import NamedTuple

from gossamer.errors import UserError

_BACKWARD = 2
"""A backward pass holds about as much again as what the forward pass kept."""

_KEPT_COPIES = 0.7
"""What a forward pass should keep at most, in copies of all workers' parameters: with the backward
pass activations are 1.4 copies, beside three or more that are there anyway."""

_SMALL_BYTES = 24 << 20
"""What any simulation may take: less would cost time and save nothing that counts."""

_KEPT_BYTES = 256 << 20
"""What stays with the process."""

_LARGEST_BLOCK_BYTES = 32 << 20
"""Of those that stay; some versions of glibc take no more."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""


class Room(NamedTuple):
    """Memory for the activations of workers that go together, in bytes."""

    good: float
    """What several of them should keep to."""

    most: float
    """What there is."""


def room(
    memory_gb: float | None,
    model_bytes: int,
    state_bytes: int,
    *,
    num_workers: int,
    one_model: bool = False,
) -> Room:
    """Return what is left for activations, as a forward pass keeps them.

        held = c (2 model + state)            with c = W copies, or 1 where there is one model
        most = (memory - held) / 2            the backward pass takes as much again
        good = min(most, max(0.7 W model, (24 MB - held) / 2))

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
    return Room(min(most, good), most)


def keep_freed_memory() -> None:
    """Let the process keep memory that it frees, for the next chunk, where glibc has the say.

    By default it maps large blocks one by one and gives them back at once, so that pages come and
    go with every chunk, which takes longer than a small model's products.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def free_bytes() -> float:
    """Return the memory that a process can take without swapping; infinite where it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    available = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return min(1024 * float(next(available, math.inf)), _cgroup_bytes())


def _cgroup_bytes() -> float:
    """Return what the process's control group (version 2) and those above it leave free."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = root / own.lstrip("/")
    above = [parent for parent in folder.parents if parent.is_relative_to(root)]
    return min(group_bytes(group) for group in (folder, *above))


def group_bytes(folder: Path) -> float:
    """Return what one control group leaves free, files that it can drop included."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return math.inf
        current = int((folder / "memory.current").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return math.inf
    cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file")), 0)
    return float(int(limit) - current + cached)
