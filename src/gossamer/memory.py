"""The memory of this process: how much is available, and how malloc keeps freed blocks."""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path

_KEPT_BYTES = 256 << 20
"""Freed memory that malloc keeps at the top of the heap."""

_LARGEST_BLOCK_BYTES = 32 << 20
"""Larger blocks are mapped one by one; some versions of glibc accept no higher threshold."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Constants of malloc.h."""


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the next chunk.

    By default it maps large blocks one by one and unmaps them when they are freed. The page faults
    of every chunk then take longer than the matrix products of a small model.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def free_bytes() -> float:
    """Return the memory that can be allocated without swapping; infinite if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    available = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return min(1024 * float(next(available, math.inf)), _cgroup_bytes())


def _cgroup_bytes() -> float:
    """Return the free memory of the process's cgroup (version 2) and its ancestors."""
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
    """Return the free memory of one cgroup, including its reclaimable file cache."""
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
