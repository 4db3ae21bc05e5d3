"""A worker that is the only one: a script that was started without a launcher."""

from __future__ import annotations

import multiprocessing
import os

import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

_NUM_PROCESSES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where torchrun, Open MPI, MPICH and srun say how many processes they have started."""


def is_alone() -> bool:
    """Whether nothing says that this process is one of several.

    A job whose processes forgot to connect must not train as many models in silence. So a launcher
    that has started more than one, or being another Python process's child, is enough to doubt it.
    """
    launched = any(os.environ.get(name, "1") != "1" for name in _NUM_PROCESSES)
    return not launched and multiprocessing.parent_process() is None


def group_of_one() -> ProcessGroup:
    """Return a group of this process alone, which torch's own groups know nothing of."""
    return dist.ProcessGroup(HashStore(), 0, 1)
