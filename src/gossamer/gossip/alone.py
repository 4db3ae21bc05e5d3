"""A process group of one, for a script that was started without a launcher."""

from __future__ import annotations

import multiprocessing
import os

import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

_NUM_PROCESSES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Environment variables in which torchrun, Open MPI, MPICH and srun set the number of processes."""


def is_alone() -> bool:
    """Whether nothing indicates that this process is one of several.

    A job that forgot ``init_process_group`` must not silently train one model per process. So this
    is False under a launcher of several processes, and in a child of another Python process.
    """
    launched = any(os.environ.get(name, "1") != "1" for name in _NUM_PROCESSES)
    return not launched and multiprocessing.parent_process() is None


def group_of_one() -> ProcessGroup:
    """Return a group of this process alone, not registered with torch.distributed."""
    return dist.ProcessGroup(HashStore(), 0, 1)
