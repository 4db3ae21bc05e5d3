"""What all workers know when a controller decides."""

# n: workers, m: floats in a sketch

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

from gossamer.topology.arrays import FloatArray


@final
@dataclass(frozen=True, kw_only=True)
class Observation:
    """What all ranks know when they decide how to mix: the same bits on each of them."""

    step: int
    """The step whose mixing is decided."""

    lr: float
    """The learning rate of that step. Under awc, of the step before: the round of step t + 1 is
    decided inside step t, before a scheduler moves."""

    sketches: FloatArray | None = None
    """Sketches [n, m] of what is to be mixed. Under awc, of what was to be mixed a step before: the
    round is chosen before the step that it mixes has been taken."""

    gradients: FloatArray | None = None
    """Sketches [n, m] of each worker's gradient; NaN for workers without one."""

    points: FloatArray | None = None
    """Sketches [n, m] of the parameters at which those gradients were taken; under awc these are
    what is mixed."""


class Needs(NamedTuple):
    """Which parts of an observation are read: nothing else is measured and gathered."""

    sketches: bool = False
    gradients: bool = False
    points: bool = False
