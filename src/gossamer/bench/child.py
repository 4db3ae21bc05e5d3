"""One run in a process of its own, forked from a server that has imported this module."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gossamer.bench.recording import checkpointing, record_run
from gossamer.bench.store import Store, StoreError
from gossamer.engine import run
from gossamer.engine.handover import receive
from gossamer.lifeline import end_with_parent
from gossamer.records import Ended, Record

# The first optimizer of a process imports hundreds of modules; here the server does it for all.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

_LAST_WORDS_S = 0.3
"""How long a process may take to end what it has started, when the runner is gone."""


class Budget(NamedTuple):
    """What one of several runs at a time may take of the machine."""

    threads: int
    memory_gb: float | None
    """None where it is not known what is free."""

    norms_mb: float
    """The most that its norms may take on the disk."""

    checkpoint_s: float
    """Seconds between two checkpoints; 0 for none."""


class Began(NamedTuple):
    """The process is there."""


class Advanced(NamedTuple):
    """A run has taken so many steps."""

    step: int


class Finished(NamedTuple):
    """A run has ended, and its file has its name."""

    ended: Ended
    metric: float | None
    """Of the average model, in the last evaluation."""


News = Began | Advanced | Finished | StoreError


def run_here(
    specification: str, run_id: str, folder: str, budget: Budget, pipe: Connection
) -> None:
    """Run a specification; write its records, and send how it goes on.

    Its records are those of the run that was planned, also where it cannot be that run here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner decides
    signal.signal(signal.SIGTERM, _leave)
    end_with_parent(signal.SIGTERM)
    threading.Thread(target=_end_with_runner, daemon=True).start()
    torch.set_num_threads(budget.threads)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.send(Began())
        try:
            store = Store(Path(folder))

            def begin() -> Iterator[Record]:
                spec = receive(specification, run_id, "since the experiment began")
                return run(
                    spec,
                    memory_gb=budget.memory_gb,
                    norms_mb=0.0 if spec.validation_share else budget.norms_mb,
                    checkpointing=checkpointing(store, spec, budget.checkpoint_s),
                )

            outcome = record_run(store, run_id, begin, lambda step: pipe.send(Advanced(step)))
            pipe.send(Finished(outcome.ended, outcome.metric))
        except StoreError as error:
            pipe.send(error)


def _end_with_runner() -> None:
    """End this process when the runner has ended, however it did.

    Its parent in the kernel's eyes is the server that forked it, which goes on as long as one of
    its processes does.
    """
    runner = multiprocessing.parent_process()
    assert runner is not None, "started by a runner"
    runner.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_WORDS_S)  # a signal is handled between two calls of torch, and one may be long
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(signum: int, frame: Any) -> None:
    sys.exit(1)
