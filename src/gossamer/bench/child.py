"""One run in its own process, forked from a server that has imported this module."""

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

# The first optimizer imports hundreds of modules; here the fork server does it once for all runs.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

_LAST_WORDS_S = 0.3
"""How long a process may take to end its children after the runner has died."""


class Budget(NamedTuple):
    """What one of several concurrent runs may use of the machine."""

    threads: int
    memory_gb: float | None
    """None if the free memory is unknown."""

    norms_mb: float
    """Disk space for its norms, at most."""

    checkpoint_s: float
    """Seconds between two checkpoints; 0 for none."""


class Began(NamedTuple):
    """The process is ready."""


class Advanced(NamedTuple):
    """A run has taken so many steps."""

    step: int


class Finished(NamedTuple):
    """A run has ended, and its file is complete."""

    ended: Ended
    metric: float | None
    """Of the average model, in the last evaluation."""


News = Began | Advanced | Finished | StoreError


def run_here(
    specification: str, run_id: str, folder: str, budget: Budget, pipe: Connection
) -> None:
    """Run a specification; write its records, and send its progress through the pipe.

    Records are written under the id that was planned, even if the run turns out to be another one
    here, because the source of a plug-in has changed: then it ends with an error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the runner
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
    """End this process when the runner ends, even by SIGKILL.

    ``end_with_parent`` is not enough: the parent process is the fork server, which lives as long as
    one of its children does.
    """
    runner = multiprocessing.parent_process()
    assert runner is not None, "started by a runner"
    runner.join()
    os.kill(os.getpid(), signal.SIGTERM)
    # Python runs the handler of SIGTERM between two calls of torch, and one may take long.
    time.sleep(_LAST_WORDS_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(signum: int, frame: Any) -> None:
    sys.exit(1)
