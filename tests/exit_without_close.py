"""What test_gossip_processes runs: a rank that ends without close(), or in an exception.

python -m tests.exit_without_close forgets|raises STORE RANK
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import gossamer
from tests.reference import loss_of, make_model


def main(mode: str, store: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
