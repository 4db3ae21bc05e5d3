"""The file of one run: its records as they come, and an end, also where the run raises."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gossamer.bench.store import Store
from gossamer.engine import Checkpointing, RunSpec
from gossamer.errors import UserError
from gossamer.records import RESULTS, Ended, Evaluation, Record, Step

_LONGEST_REASON = 4000


class Outcome(NamedTuple):
    """What a run came to."""

    ended: Ended
    metric: float | None
    """Of the average model, in the last evaluation."""

    failure: Exception | None
    """What it raised."""


def record_run(
    store: Store,
    run_id: str,
    run: Callable[[], Iterator[Record]],
    advanced: Callable[[int], object],
) -> Outcome:
    """Write a run's records; what it raises is its end, what the disk refuses is raised.

    A run with a result needs its checkpoint no more. One that failed keeps it, to be tried again.

    Args:
        store: where they are kept.
        run_id: of the run.
        run: makes the records, as they are asked for.
        advanced: is told how many steps it has taken.
    """
    ended, metric = Ended(status="error", reason="there was no end"), None
    failures: list[Exception] = []
    with store.writing(run_id) as write:
        for record in _with_end(run, failures):
            write(record)
            if isinstance(record, Ended):
                ended = record
            elif isinstance(record, Evaluation):
                metric = record.average
            elif isinstance(record, Step):
                advanced(record.step)
    if ended.status in RESULTS:
        store.drop_checkpoint(run_id)
    return Outcome(ended, metric, failures[0] if failures else None)


def checkpointing(store: Store, spec: RunSpec, every_s: float) -> Checkpointing | None:
    """Return where a run goes on from and how often it saves itself; 0 for never."""
    return Checkpointing(store.checkpoint_folder(spec.id), every_s) if every_s else None


def _with_end(run: Callable[[], Iterator[Record]], failures: list[Exception]) -> Iterator[Record]:
    try:
        yield from run()  # called here: what it takes to begin may fail too
    except Exception as error:
        failures.append(error)
        yield ended_by(error)


def ended_by(error: Exception) -> Ended:
    """Return the record: what a user can cause says what to do, anything else where it happened."""
    if isinstance(error, UserError):
        return Ended(status="error", reason=str(error))
    trace = "".join(traceback.format_exception(error))
    return Ended(status="error", reason=trace[-_LONGEST_REASON:])
