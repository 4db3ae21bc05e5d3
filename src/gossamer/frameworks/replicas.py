"""What a framework's checkpoint lacks: every worker's own state, in a folder beside or inside it.

Frameworks save what one process has, for under DDP all have the same. Theirs is then the average,
which any program can load; ours is what continues a run bit for bit.
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
    """Save every worker's model and moments. A collective call, outside of ``averaged()``.

    As frameworks do, it overwrites: the folder holds this step, and no later one of another run.
    """
    others = CheckpointFolder(Path(folder), gossip.rank)
    for step in others.complete_steps():
        if step > gossip.num_steps:
            shutil.rmtree(others.of(step), ignore_errors=True)
    gossip.gather(0)  # none saves before all have removed
    _checkpoints(folder, gossip, model, optimizers).save()


def restore_replicas(
    folder: PathLike, gossip: Gossip, model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Continue from what ``save_replicas`` wrote. A collective call.

    Where there is nothing, the framework's own checkpoint is what the run goes on from, which all
    workers have loaded: one model, and one worker's moments.
    """
    if not _checkpoints(folder, gossip, model, optimizers).restore() and gossip.rank == 0:
        _log.warning(
            "%s has no states of workers: they start from one model, and from one's moments", folder
        )


def _checkpoints(
    folder: PathLike, gossip: Gossip, model: nn.Module, optimizers: Sequence[Optimizer]
) -> Checkpoints:
    objects: dict[str, Any] = {f"optimizer{i}": each for i, each in enumerate(optimizers)}
    return Checkpoints(Path(folder), gossip, keep=1, model=model, **objects)
