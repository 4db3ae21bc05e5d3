"""What test_checkpoints runs: two ranks, of which the second stalls while it writes step 4.

python -m tests.killed_while_saving FOLDER RANK
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import gossamer
from gossamer.gossip import snapshot
from tests.reference import ALL_OPTIMIZERS, loss_of, make_model


def write_half(tensors: Any, path: Path) -> None:
    """Write what has come to the disk when a process is killed in the middle."""
    save_file(tensors, path)
    os.truncate(path, path.stat().st_size // 2)
    print("half", flush=True)
    time.sleep(60)


def main(folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = make_model()
    optimizer = ALL_OPTIMIZERS["adamw"](model.parameters())
    gossip = gossamer.decentralize(model, optimizer, "ring", timeout=timedelta(seconds=20))
    checkpoints = gossamer.Checkpoints(f"{folder}/run", gossip, model=model, optimizer=optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if step == 3 and rank == 1:
            snapshot.save_file = write_half
        if step % 2 == 1:
            checkpoints.save()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
