"""One run in a process of its own, forked from a server that has imported this module."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gossamer.bench.failure import ended_by
from gossamer.bench.store import Store, StoreError
from gossamer.engine import RunSpec, run
from gossamer.engine.lifeline import end_with_parent
from gossamer.records import Ended, Evaluation, Record, Step

# The first optimizer of a process imports hundreds of modules; here the server does it for all.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


class Share(NamedTuple):
    """What one of several runs at a time may take of the machine."""

    threads: int
    memory_gb: float | None
    """None where it is not known what is free."""


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


def run_here(specification: str, folder: str, share: Share, pipe: Connection) -> None:
    """Run a specification; write its records, and send how it goes on.

    Ends when the runner is gone: the server that forked it ends with the runner.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner decides
    signal.signal(signal.SIGTERM, _leave)
    end_with_parent(signal.SIGTERM)
    torch.set_num_threads(share.threads)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.send(Began())
        try:
            spec = RunSpec.model_validate_json(specification)
            pipe.send(_write(spec, Store(Path(folder)), share, pipe))
        except StoreError as error:
            pipe.send(error)


def _write(spec: RunSpec, store: Store, share: Share, pipe: Connection) -> Finished:
    ended, metric = Ended(status="error", reason="there was no end"), None
    with store.writing(spec.id) as write:
        for record in _records(spec, share):
            write(record)
            if isinstance(record, Ended):
                ended = record
            elif isinstance(record, Evaluation):
                metric = record.average
            elif isinstance(record, Step):
                pipe.send(Advanced(record.step))
    return Finished(ended, metric)


def _records(spec: RunSpec, share: Share) -> Iterator[Record]:
    """Yield the records of a run; what it raises is its end."""
    try:
        yield from run(spec, memory_gb=share.memory_gb)
    except Exception as error:
        yield ended_by(error)


def _leave(signum: int, frame: Any) -> None:
    sys.exit(1)
