"""What test_gossip_shards runs: two nodes of two, of which the last rank is killed or stalls.

python -m tests.killed_shard FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from tests.forks import run_forked
from tests.sharded_ranks import Run, nodes, start, take_step

MODES = ("killed", "stalled")
TIMEOUT = timedelta(seconds=4)
CULPRIT = 3


def train(folder: Path, mode: str, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / mode}", rank=rank, world_size=4, timeout=TIMEOUT
    )
    run = Run(optimizer="adamw", options=(("timeout", TIMEOUT),))
    model, optimizer, gossip = start(run, nodes())
    for step in range(3):
        take_step(run, model, optimizer, step)
    if rank == CULPRIT and mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    if rank == CULPRIT:
        time.sleep(2.2 * TIMEOUT.total_seconds())
        os._exit(0)
    try:
        for step in range(3, 9):
            take_step(run, model, optimizer, step)
    except RuntimeError:
        (folder / f"{mode}-{rank}.seconds").write_text(f"{time.monotonic() - began}")
        raise
    gossip.close()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    run_forked(
        where,
        {
            f"{mode}-{rank}": partial(train, where, mode, rank)
            for mode in MODES
            for rank in range(4)
        },
    )
