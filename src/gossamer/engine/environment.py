"""Where a run was done: versions, commit, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch


@cache
def environment() -> dict[str, str]:
    """Return what a result depends on besides its specification, for its first record."""
    return {
        "gossamer": metadata.version("gossamer"),
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }


def _commit() -> str:
    """Return the commit of the code that runs, where it runs from a checkout."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(
            describe, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
