"""Processes that others have started, and whether they are still there (Linux)."""

from __future__ import annotations

from pathlib import Path


def descendants(process: int) -> set[int]:
    """Return the processes that one has started, and those that these have."""
    children: dict[int, set[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # ended meanwhile
            continue
        children.setdefault(parent, set()).add(int(path.parent.name))
    found, new = set[int](), {process}
    while new:
        new = {child for one in new for child in children.get(one, ())}
        found |= new
    return found


def is_there(process: int) -> bool:
    """Return whether a process has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
