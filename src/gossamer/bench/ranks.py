"""The distributed runs of an experiment on ranks that torchrun has started, on any number of nodes.

    torchrun --nnodes 2 --nproc-per-node 4 … --no-python gossamer bench run FILE --out FOLDER

Every rank reads the same file. Rank 0 writes the records in its folder, and broadcasts which runs
are left; so a job that is restarted, by torchrun or by hand, resumes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from gossamer.bench.experiment import Experiment
from gossamer.bench.matrix import expand
from gossamer.bench.norms import affordable
from gossamer.bench.planned import planned_runs
from gossamer.bench.recording import checkpointing, record_run
from gossamer.bench.runner import Listener, is_pending
from gossamer.bench.store import Store
from gossamer.bench.trials import Trials
from gossamer.engine import Checkpointing, RunSpec
from gossamer.engine.checkpoints import EVERY_S
from gossamer.engine.distributed import train_rank
from gossamer.engine.handover import other_source
from gossamer.errors import UserError
from gossamer.records import Record

_log = logging.getLogger(__name__)

_Value = TypeVar("_Value")


def under_torchrun() -> bool:
    """Return whether this process is a rank that torchrun or the lab has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_as_rank(
    experiment: Experiment,
    store: Store,
    listener: Listener,
    *,
    retry: bool = False,
    checkpoint_s: float = EVERY_S,
) -> None:
    """Take part in the distributed runs whose number of workers is the number of ranks.

    An exception of a run is recorded, and ends the job on all ranks: torchrun's ``--max-restarts``
    restarts it with the runs that are left.

    Args:
        experiment: which runs there are.
        store: where rank 0 writes records; locked during the call.
        listener: receives progress, on rank 0.
        retry: run failed runs again; the records of the failed attempt are kept.
        checkpoint_s: seconds between two checkpoints of a run, which each rank writes to its
            node's folder; 0 for none.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    trials = Trials(store)
    matrix = expand(experiment, _from_first(trials.outcomes() if first else None))
    ours = _ours(experiment, matrix.runs)
    if first and len(ours) < len(matrix.runs):
        left_out, size = len(matrix.runs) - len(ours), dist.get_world_size()
        _log.warning("%d runs are simulated or not on %d workers: left out", left_out, size)
    norms_mb = affordable(experiment.norms_mb) if first else 0.0  # only rank 0 writes
    begun: set[str] = set()
    planned = planned_runs(matrix).model_dump_json()
    with store.locked(experiment.text, planned) if first else contextlib.nullcontext():
        while ours:
            ids = _gather([spec.id for spec in ours])
            flags = [first and is_pending(store, spec, retry=retry) for spec in ours]
            pending = list(itertools.compress(ours, _from_first(flags)))
            if first:
                listener.planned(pending, len(begun) + len(ours) - len(pending))
            for spec in pending:
                where = checkpointing(store, spec, checkpoint_s)
                of_run_mb = 0.0 if spec.validation_share else norms_mb
                train = partial(_train, spec, of_run_mb, where, ids[spec.id])
                if first:
                    _lead(spec, store, listener, train)
                else:
                    deque(train(), maxlen=0)
                dist.barrier()  # not before rank 0 has the records on disk
                store.drop_checkpoint(spec.id)
            begun |= {spec.id for spec in ours}
            matrix = expand(experiment, _from_first(trials.outcomes() if first else None))
            ours = [spec for spec in _ours(experiment, matrix.runs) if spec.id not in begun]
            if first:
                store.plan(planned_runs(matrix).model_dump_json())
    dist.destroy_process_group()


def _ours(experiment: Experiment, runs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return the runs that this number of ranks can do."""
    size = dist.get_world_size()
    ours = [spec for spec in runs if spec.engine == "distributed" and spec.workers == size]
    if not ours:
        raise UserError(
            f"on {size} ranks, {experiment.name} must have distributed runs on {size} workers, got "
            "none; start as many ranks as a run has workers"
        )
    return ours


def _gather(ids: list[str]) -> dict[str, list[str]]:
    """Return the ids that all ranks have for a run, by this rank's id.

    Ids depend on the sources of plug-ins, so they differ where a node has another source.

    Raises:
        UserError: ranks have different numbers of runs.
    """
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, ids)
    numbers = [len(each) for each in everyones]
    if len(set(numbers)) > 1:
        raise UserError(
            "an experiment must have the same runs on all ranks, got "
            f"{', '.join(map(str, numbers))} of them; use the same files on all nodes"
        )
    return {mine: list(each) for mine, each in zip(ids, zip(*everyones, strict=True), strict=True)}


def _train(
    spec: RunSpec, norms_mb: float, where: Checkpointing | None, ids: list[str]
) -> Iterator[Record]:
    """Train as a rank; if sources of plug-ins differ, all ranks raise, so that none blocks."""
    others = [str(rank) for rank, each in enumerate(ids) if each != ids[0]]
    if others:
        raise other_source(f"on rank {', '.join(others)} than on rank 0")
    return train_rank(spec, norms_mb, where)


def _lead(
    spec: RunSpec, store: Store, listener: Listener, train: Callable[[], Iterator[Record]]
) -> None:
    """Do a run as rank 0: write its records, and report its progress."""
    store.set_aside(spec.id)
    listener.started(spec)
    outcome = record_run(store, spec.id, train, partial(listener.advanced, spec))
    listener.ended(spec, outcome.ended, outcome.metric)
    if outcome.failure is not None:
        raise outcome.failure


def _from_first(value: _Value) -> _Value:
    """Return the value of rank 0, which alone reads and writes records."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
