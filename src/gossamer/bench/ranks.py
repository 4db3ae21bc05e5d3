"""The distributed runs of an experiment on ranks that torchrun has started, on any number of nodes.

    torchrun --nnodes 2 --nproc-per-node 4 … --no-python gossamer bench run FILE --out FOLDER

Every rank reads the same file. Rank 0 keeps the records, in its folder, and tells the others what
is still to be done; so a job that is started again, by torchrun or by hand, goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from gossamer.bench.experiment import Experiment
from gossamer.bench.matrix import expand
from gossamer.bench.norms import affordable
from gossamer.bench.planned import planned_runs
from gossamer.bench.recording import checkpointing, record_run
from gossamer.bench.runner import Listener, is_pending
from gossamer.bench.store import Store
from gossamer.engine import Checkpointing, RunSpec
from gossamer.engine.checkpoints import EVERY_S
from gossamer.engine.distributed import train_rank
from gossamer.engine.handover import other_source
from gossamer.errors import UserError
from gossamer.records import Record

_log = logging.getLogger(__name__)


def under_torchrun() -> bool:
    """Return whether this process is a rank that torchrun, or the lab, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_as_rank(
    experiment: Experiment,
    store: Store,
    listener: Listener,
    *,
    retry: bool = False,
    checkpoint_s: float = EVERY_S,
) -> None:
    """Take part in the distributed runs that are on as many workers as there are ranks.

    What a run raises is recorded as its end, and ends the job on all ranks: torchrun's
    ``--max-restarts`` starts it again, with the runs that are left.

    Args:
        experiment: what is compared.
        store: where rank 0 keeps records; locked meanwhile.
        listener: who is told, on rank 0.
        retry: run those again that failed; what is known of them is kept.
        checkpoint_s: seconds between two checkpoints of a run, which each rank keeps in its node's
            folder; 0 for none.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, first = dist.get_world_size(), dist.get_rank() == 0
    matrix = expand(experiment)
    runs = matrix.runs
    ours = [spec for spec in runs if spec.engine == "distributed" and spec.workers == size]
    if not ours:
        raise UserError(
            f"on {size} ranks, {experiment.name} must have distributed runs on {size} workers, got "
            "none; start as many ranks as a run has workers"
        )
    if first and len(ours) < len(runs):
        left_out = len(runs) - len(ours)
        _log.warning("%d runs are simulated or not on %d workers: left out", left_out, size)
    ids = _gather([spec.id for spec in ours])
    norms_mb = affordable(experiment.norms_mb) if first else 0.0  # the others write nothing
    planned = planned_runs(matrix).model_dump_json()
    with store.locked(experiment.text, planned) if first else contextlib.nullcontext():
        flags = [first and is_pending(store, spec, retry=retry) for spec in ours]
        pending = list(itertools.compress(ours, _broadcast(flags)))
        if first:
            listener.planned(pending, len(ours) - len(pending))
        for spec in pending:
            where = checkpointing(store, spec, checkpoint_s)
            train = partial(_train, spec, norms_mb, where, ids[spec.id])
            if first:
                _lead(spec, store, listener, train)
            else:
                deque(train(), maxlen=0)
            dist.barrier()  # the records are on the disk
            store.drop_checkpoint(spec.id)
    dist.destroy_process_group()


def _gather(ids: list[str]) -> dict[str, list[str]]:
    """Return what every rank calls a run, by what this one does: an id has its plug-ins' sources.

    Raises:
        UserError: another rank has more runs, or fewer.
    """
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, ids)
    numbers = [len(each) for each in everyones]
    if len(set(numbers)) > 1:
        raise UserError(
            "an experiment must have the same runs on all ranks, got "
            f"{', '.join(map(str, numbers))} of them; make the files equal on all nodes"
        )
    return {mine: list(each) for mine, each in zip(ids, zip(*everyones, strict=True), strict=True)}


def _train(
    spec: RunSpec, norms_mb: float, where: Checkpointing | None, ids: list[str]
) -> Iterator[Record]:
    """Train as a rank where all have one source; else all raise alike, so that none waits."""
    others = [str(rank) for rank, each in enumerate(ids) if each != ids[0]]
    if others:
        raise other_source(f"on rank {', '.join(others)} than on rank 0")
    return train_rank(spec, norms_mb, where)


def _lead(
    spec: RunSpec, store: Store, listener: Listener, train: Callable[[], Iterator[Record]]
) -> None:
    """Do a run as rank 0: write its records, and tell how it goes on."""
    store.set_aside(spec.id)
    listener.started(spec)
    outcome = record_run(store, spec.id, train, partial(listener.advanced, spec))
    listener.ended(spec, outcome.ended, outcome.metric)
    if outcome.failure is not None:
        raise outcome.failure


def _broadcast(flags: list[bool]) -> list[bool]:
    """Return the flags that rank 0 has."""
    numbers = torch.tensor(flags, dtype=torch.int)
    dist.broadcast(numbers, src=0)
    return [bool(number) for number in numbers]
