"""What test_checkpoints runs: two ranks, of which the second is killed while it writes step 4.

python -m tests.killed_while_saving FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

import gossamer
from gossamer.gossip import snapshot
from tests.forks import run_forked
from tests.reference import ALL_OPTIMIZERS, loss_of, make_model


def write_half(tensors: Any, path: Path) -> None:
    """End in the middle of a file."""
    save_file(tensors, path)
    os.truncate(path, path.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, rank: int) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = make_model()
    optimizer = ALL_OPTIMIZERS["adamw"](model.parameters())
    gossip = gossamer.decentralize(model, optimizer, "ring", timeout=timedelta(seconds=20))
    checkpoints = gossamer.Checkpoints(folder / "run", gossip, model=model, optimizer=optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if step == 3 and rank == 1:
            snapshot.save_file = write_half
        if step % 2 == 1:
            checkpoints.save()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    run_forked(where, {str(rank): partial(train, where, rank) for rank in range(2)})
