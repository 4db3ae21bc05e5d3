"""One run in a process of its own, forked from a server that has imported this module."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gossamer.bench.store import Store, StoreError
from gossamer.engine import RunSpec, run
from gossamer.errors import UserError
from gossamer.records import Ended, Evaluation, Record, Step

with contextlib.suppress(ImportError):
    import sklearn.datasets  # noqa: F401  # pyright: ignore[reportUnusedImport] - takes seconds

_LONGEST_REASON = 4000


def run_here(specification: str, folder: str, threads: int, pipe: Connection) -> None:
    """Run a specification; write its records, and send those that show progress.

    A send fails when the runner is gone, which ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner decides
    signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(threads)
    spec = RunSpec.model_validate_json(specification)
    ended: Record | None = None
    try:
        with Store(Path(folder)).writing(spec.id) as write:
            for record in _records(spec):
                write(record)
                if isinstance(record, Ended):
                    ended = record
                elif isinstance(record, Step | Evaluation):
                    pipe.send(record)
        pipe.send(ended)  # not before the file has its name
    except StoreError as error:
        pipe.send(error)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)


def _records(spec: RunSpec) -> Iterator[Record]:
    """Yield the records of a run; what it raises is its end."""
    try:
        yield from run(spec)
    except UserError as error:
        yield Ended(status="error", reason=str(error))
    except Exception:
        yield Ended(status="error", reason=traceback.format_exc()[-_LONGEST_REASON:])


def _leave(signum: int, frame: Any) -> None:
    sys.exit(1)
