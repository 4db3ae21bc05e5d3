"""The one way to run a specification, whichever engine it names."""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.engine import distributed, simulated
from gossamer.engine.spec import RunSpec
from gossamer.records import Record


def run(spec: RunSpec, *, memory_gb: float | None = None) -> Iterator[Record]:
    """Train as specified; yield records while it goes on.

    Args:
        spec: what to train, and how.
        memory_gb: most memory of a simulation; by default what is free.
    """
    if spec.engine == "simulated":
        return simulated.run(spec, memory_gb)
    return distributed.run(spec)
