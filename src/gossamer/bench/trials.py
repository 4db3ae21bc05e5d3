"""The results of the trials in a folder, from which the next runs of an experiment follow."""

from __future__ import annotations

import math
from typing import final

from gossamer.bench.store import Store
from gossamer.bench.tuning import Outcomes, is_trial
from gossamer.errors import UserError
from gossamer.records import RESULTS, Evaluation


@final
class Trials:
    """Reads the trials of a folder; each run that has ended is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, float | None] = {}
        self._others: set[str] = set()

    def outcomes(self) -> Outcomes:
        """Return the results so far; a trial that failed has none, and may be retried."""
        for run_id in self._store.run_ids():
            if run_id in self._known or run_id in self._others:
                continue
            started, ended = self._store.started(run_id), self._store.ended(run_id)
            if started is None or ended is None:
                continue
            if not is_trial(started.spec):
                self._others.add(run_id)
            elif ended.status in RESULTS:
                self._known[run_id] = self._metric(run_id) if ended.status == "done" else None
        return dict(self._known)

    def _metric(self, run_id: str) -> float | None:
        story = self._store.read(run_id)
        if story.damage:  # the last evaluation may be missing
            raise UserError(
                f"records of a trial must be complete, got {story.damage}; remove the file, and "
                "run the experiment again"
            )
        *_, last = [math.nan, *(r.average for r in story.records if isinstance(r, Evaluation))]
        return last if math.isfinite(last) else None
