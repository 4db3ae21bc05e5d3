"""At which steps norms are measured: just before workers average, once per interval."""

from __future__ import annotations

from typing import final

from gossamer.consensus.dispersion import check_interval
from gossamer.topology import Schedule


@final
class NormSteps:
    """The steps at which norms are measured, one in each interval.

    It is the last step of the interval whose parameters the schedule mixes. Most schedules mix at
    every step, and then it is the last step; with ``every=8`` seven steps of eight are local, and
    DBench wants the replicas just before they average, which is the eighth. An interval of local
    steps only has none. A controller's decisions are not known in advance, and are ignored here.

    Args:
        schedule: the round of every step.
        overlaps: whether an update is mixed with the round of the step after it, and not with its
            own.
        every: steps of an interval; 0 measures nothing.
    """

    def __init__(self, schedule: Schedule, overlaps: bool, every: int) -> None:
        self._schedule = schedule
        self._ahead = 1 if overlaps else 0
        self._every = check_interval(every)
        self._interval, self._chosen = -1, -1

    def __contains__(self, step: int) -> bool:
        """Return whether norms are measured after the update of a step, from 0."""
        if not self._every:
            return False
        if self._interval != step // self._every:
            self._interval = step // self._every
            self._chosen = self._last_of(self._interval * self._every)
        return step == self._chosen

    def _last_of(self, first: int) -> int:
        """Return the last step of an interval that is mixed, or -1."""
        if self._schedule.num_workers == 1:  # no step is mixed
            return first + self._every - 1
        steps = range(first + self._every - 1, first - 1, -1)
        mixed = (step for step in steps if self._schedule.round(step + self._ahead).degree)
        return next(mixed, -1)
