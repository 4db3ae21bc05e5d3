"""The memory of this process: what it may take, and what it keeps of what it frees."""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path

_KEPT_BYTES = 256 << 20
"""What stays with the process."""

_LARGEST_BLOCK_BYTES = 32 << 20
"""Of those that stay; some versions of glibc take no more."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""


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
