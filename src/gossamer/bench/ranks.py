"""The distributed runs of an experiment on ranks that torchrun has started, on any number of nodes.

    torchrun --nnodes 2 --nproc-per-node 4 … --no-python gossamer bench run FILE --out FOLDER

Every rank reads the same file. Rank 0 keeps the records, in its folder, and tells the others what
is still to be done; so a job that is started again, by torchrun or by hand, goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from gossamer.bench.experiment import Experiment
from gossamer.bench.matrix import expand
from gossamer.bench.runner import is_pending
from gossamer.bench.store import Store
from gossamer.engine import RunSpec
from gossamer.engine.distributed import train_rank
from gossamer.errors import UserError
from gossamer.records import Record


def under_torchrun() -> bool:
    """Return whether this process is a rank of torchrun's."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_as_rank(experiment: Experiment, store: Store) -> None:
    """Take part in the distributed runs that are on as many workers as there are ranks.

    An exception ends the job on all ranks; torchrun's ``--max-restarts`` starts it again, with the
    run that was cut off.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, first = dist.get_world_size(), dist.get_rank() == 0
    runs = [
        spec
        for spec in expand(experiment).runs
        if spec.engine == "distributed" and spec.workers == size
    ]
    if not runs:
        raise UserError(
            f"under torchrun, {experiment.name} must have distributed runs on {size} workers, got "
            "none; start as many ranks as a run has workers"
        )
    with store.locked(experiment.text) if first else contextlib.nullcontext():
        for spec in runs:
            if _agreed(is_pending(store, spec, retry=True) if first else False):
                _run(spec, store if first else None)
    dist.destroy_process_group()


def _run(spec: RunSpec, store: Store | None) -> None:
    if store is None:
        for _ in train_rank(spec):
            pass
        return
    store.set_aside(spec.id)
    with store.writing(spec.id) as write:
        for record in _told(spec):
            write(record)


def _told(spec: RunSpec) -> Iterator[Record]:
    for record in train_rank(spec):
        yield record
        if record.kind == "ended":
            print(
                f"{spec.method}, {spec.workers} ranks, seed {spec.seed}: {record.status}",
                file=sys.stderr,
                flush=True,
            )


def _agreed(decided: bool) -> bool:
    """Return what rank 0 decided."""
    decision = torch.tensor([int(decided)])
    dist.broadcast(decision, src=0)
    return bool(decision.item())
