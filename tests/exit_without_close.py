"""What test_gossip_processes runs: ranks that end without close(), or in an exception.

python -m tests.exit_without_close FOLDER
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import gossamer
from tests.forks import run_forked
from tests.reference import loss_of, make_model

MODES = ("forgets", "raises")
NUM_RANKS = 3


def train(folder: Path, mode: str, rank: int) -> None:
    store = f"file://{folder / mode}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Two senders each, and not one group: the collecting thread is at work.
    topology = gossamer.topology.from_matrix([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]])
    gossamer.decentralize(model, optimizer, topology, timeout=timedelta(seconds=10))
    for step in range(6):
        if step == 4 and rank == 1 and mode == "raises":
            raise ValueError("on purpose")
        if rank == 2:
            time.sleep(0.2)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def main(folder: Path) -> None:
    run_forked(
        folder,
        {
            f"{mode}-{rank}": partial(train, folder, mode, rank)
            for mode in MODES
            for rank in range(NUM_RANKS)
        },
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
