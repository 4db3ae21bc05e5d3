"""Write the records of one run as they come, and a last one even if the run raises."""

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
    """How a run ended."""

    ended: Ended
    metric: float | None
    """Of the average model, in the last evaluation."""

    failure: Exception | None
    """The exception that it raised, if any."""


def record_run(
    store: Store,
    run_id: str,
    run: Callable[[], Iterator[Record]],
    advanced: Callable[[int], object],
) -> Outcome:
    """Write a run's records. An exception of the run becomes its last record; one of the store is
    raised.

    The checkpoint is removed if the run has a result, and kept for a retry if it failed.

    Args:
        store: where they are written.
        run_id: of the run.
        run: returns an iterator over its records.
        advanced: called with the number of steps taken.
    """
    ended, metric = Ended(status="error", reason="the run has no last record"), None
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
    """Return where and how often a run saves checkpoints; None for an interval of 0."""
    return Checkpointing(store.checkpoint_folder(spec.id), every_s) if every_s else None


def _with_end(run: Callable[[], Iterator[Record]], failures: list[Exception]) -> Iterator[Record]:
    try:
        yield from run()  # called inside the try: starting may fail too
    except Exception as error:
        failures.append(error)
        yield ended_by(error)


def ended_by(error: Exception) -> Ended:
    """Return the last record of a failed run: the message of a UserError, else the traceback."""
    if isinstance(error, UserError):
        return Ended(status="error", reason=str(error))
    trace = "".join(traceback.format_exception(error))
    return Ended(status="error", reason=trace[-_LONGEST_REASON:])
