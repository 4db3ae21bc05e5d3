"""The properties of a schedule by which topologies are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gossamer.topology.schedules import Schedule
from gossamer.topology.spectrum import mixing_rate, rounds_to_consensus, window


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Cost and mixing speed of a schedule, over its period or a window of its rounds."""

    name: str
    num_workers: int
    period: int | None
    """Rounds until they repeat; None where they never do."""

    degree: int
    """The most neighbours any worker has in any round."""

    messages: float
    """Messages that the busiest worker sends per round, on average over rounds."""

    copies_sent: float
    """Model copies that the busiest worker sends per round, on average over rounds."""

    mixing_rate: float | None
    """p of a static round with the same contraction per round; None if the mean moves."""

    rounds_to_consensus: int | None
    """Rounds to the exact average; None where it is only approached, or the mean moves."""


def summarize(schedule: Schedule) -> Summary:
    """Return the cost and the mixing speed of a schedule."""
    rounds = [schedule.round(step) for step in range(window(schedule))]
    conserved = all(round.conserves_mean for round in rounds)
    return Summary(
        name=schedule.name,
        num_workers=schedule.num_workers,
        period=schedule.period,
        degree=max(round.degree for round in rounds),
        messages=_of_busiest([round.messages_sent for round in rounds]),
        copies_sent=_of_busiest([round.copies_sent for round in rounds]),
        mixing_rate=mixing_rate(schedule) if conserved else None,
        rounds_to_consensus=rounds_to_consensus(schedule) if conserved else None,
    )


def _of_busiest(per_worker: Sequence[npt.NDArray[Any]]) -> float:
    return float(np.mean(per_worker, axis=0).max())
