"""What all workers know when a controller decides."""

# n: workers, m: floats in a sketch

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

from gossamer.topology.arrays import FloatArray


@final
@dataclass(frozen=True, kw_only=True)
class Observation:
    """What all ranks know when they decide: bit-identical on each, or decisions would diverge."""

    step: int
    """The step whose mixing is decided."""

    lr: float
    """The learning rate of that step. Under awc, of the previous step: the round of step t + 1 is
    decided inside step t, before the scheduler steps."""

    sketches: FloatArray | None = None
    """Sketches [n, m] of the parameters to be mixed. Under awc they are one step stale: the round
    is chosen before the step whose result it mixes."""

    gradients: FloatArray | None = None
    """Sketches [n, m] of each worker's gradient; NaN for workers without one."""

    points: FloatArray | None = None
    """Sketches [n, m] of the parameters at which those gradients were taken; under awc these are
    what is mixed."""


class Needs(NamedTuple):
    """Which parts of an observation are read; engines measure and gather only these."""

    sketches: bool = False
    gradients: bool = False
    points: bool = False
