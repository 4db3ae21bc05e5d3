"""The distributed runs of an experiment on ranks that torchrun has started, on any number of nodes.

    torchrun --nnodes 2 --nproc-per-node 4 … --no-python gossamer bench run FILE --out FOLDER

Every rank reads the same file. Rank 0 keeps the records, in its folder, and tells the others what
is still to be done; so a job that is started again, by torchrun or by hand, goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys

import torch
import torch.distributed as dist

from gossamer.bench.experiment import Experiment
from gossamer.bench.failure import ended_by
from gossamer.bench.matrix import expand
from gossamer.bench.runner import is_pending
from gossamer.bench.store import Store
from gossamer.engine import RunSpec
from gossamer.engine.distributed import train_rank
from gossamer.errors import UserError
from gossamer.records import Ended


def under_torchrun() -> bool:
    """Return whether this process is a rank that torchrun, or the lab, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_as_rank(experiment: Experiment, store: Store, *, retry: bool = False) -> None:
    """Take part in the distributed runs that are on as many workers as there are ranks.

    What a run raises is recorded as its end, and ends the job on all ranks: torchrun's
    ``--max-restarts`` starts it again, with the runs that are left.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, first = dist.get_world_size(), dist.get_rank() == 0
    runs = expand(experiment).runs
    ours = [spec for spec in runs if spec.engine == "distributed" and spec.workers == size]
    if not ours:
        raise UserError(
            f"on {size} ranks, {experiment.name} must have distributed runs on {size} workers, got "
            "none; start as many ranks as a run has workers"
        )
    with store.locked(experiment.text) if first else contextlib.nullcontext():
        if first and len(ours) < len(runs):
            _say(f"{len(runs) - len(ours)} runs are simulated or not on {size} workers: left out")
        for spec in ours:
            if _agreed(is_pending(store, spec, retry=retry) if first else False):
                _run(spec, store if first else None)
    dist.destroy_process_group()


def _run(spec: RunSpec, store: Store | None) -> None:
    if store is None:
        for _ in train_rank(spec):
            pass
        return
    store.set_aside(spec.id)
    failure: Exception | None = None
    with store.writing(spec.id) as write:
        try:
            for record in train_rank(spec):
                write(record)
                if isinstance(record, Ended):
                    _say(f"{spec.method}, {spec.workers} ranks, seed {spec.seed}: {record.status}")
        except Exception as error:
            failure = error
            write(ended_by(error))
    if failure is not None:
        raise failure


def _agreed(decided: bool) -> bool:
    """Return what rank 0 decided."""
    decision = torch.tensor([int(decided)])
    dist.broadcast(decision, src=0)
    return bool(decision.item())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
