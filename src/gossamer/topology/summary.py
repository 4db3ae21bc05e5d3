"""The facts of a schedule that one compares topologies by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gossamer.topology.schedules import Schedule
from gossamer.topology.spectrum import mixing_rate, rounds_to_consensus, window


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a schedule costs and what it achieves, over its period or a window of its rounds."""

    name: str
    num_workers: int
    period: int | None
    """Rounds until they repeat; None where they never do."""

    degree: int
    """The most neighbours any worker has in any round."""

    messages: float
    """Messages that a worker sends per round, on average."""

    copies_sent: float
    """Model copies that the busiest worker sends per round, on average over rounds."""

    mixing_rate: float
    """p of a static round with the same contraction per round."""

    rounds_to_consensus: int | None
    """Rounds to the exact average; None where it is only approached."""


def summarize(schedule: Schedule) -> Summary:
    """Return the facts of a schedule."""
    rounds = [schedule.round(step) for step in range(window(schedule))]
    return Summary(
        name=schedule.name,
        num_workers=schedule.num_workers,
        period=schedule.period,
        degree=max(round.degree for round in rounds),
        messages=float(np.mean([round.out_degrees.mean() for round in rounds])),
        copies_sent=float(np.mean([round.copies_sent for round in rounds])),
        mixing_rate=mixing_rate(schedule),
        rounds_to_consensus=rounds_to_consensus(schedule),
    )
