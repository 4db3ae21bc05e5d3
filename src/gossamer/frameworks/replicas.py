"""Every worker's own state, in a folder beside or inside a framework's checkpoint.

Frameworks save the state of one process, because under DDP all are equal. With gossip that is the
average, which any program can load; every worker's own state resumes a run bit for bit.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from gossamer.gossip import Checkpoints, Gossip
from gossamer.gossip.checkpoint_folder import CheckpointFolder

_log = logging.getLogger(__name__)

PathLike: TypeAlias = str | os.PathLike[str]


def save_replicas(
    folder: PathLike, gossip: Gossip, model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Save every worker's model and optimizer state. A collective call, outside ``averaged()``.

    Overwrites, as frameworks do: later steps of another run in the folder are removed.
    """
    others = CheckpointFolder(Path(folder), gossip.rank)
    for step in others.complete_steps():
        if step > gossip.num_steps:
            shutil.rmtree(others.of(step), ignore_errors=True)
    gossip.gather(0)  # a barrier: a rank that is late must not remove what another has just saved
    _checkpoints(folder, gossip, model, optimizers).save()


def restore_replicas(
    folder: PathLike, gossip: Gossip, model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Resume from the states that ``save_replicas`` wrote. A collective call.

    If there are none, the run continues from the framework's own checkpoint, which all workers have
    loaded: one model, and one worker's optimizer state.
    """
    if not _checkpoints(folder, gossip, model, optimizers).restore() and gossip.rank == 0:
        _log.warning(
            "%s has no states of workers: they start from one model and one worker's moments",
            folder,
        )


def _checkpoints(
    folder: PathLike, gossip: Gossip, model: nn.Module, optimizers: Sequence[Optimizer]
) -> Checkpoints:
    objects: dict[str, Any] = {f"optimizer{i}": each for i, each in enumerate(optimizers)}
    return Checkpoints(Path(folder), gossip, keep=1, model=model, **objects)
