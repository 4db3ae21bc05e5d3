"""The one way to run a specification, whichever engine it names."""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.engine import distributed, simulated
from gossamer.engine.checkpoints import Checkpointing
from gossamer.engine.spec import RunSpec
from gossamer.records import Record


def run(
    spec: RunSpec,
    *,
    memory_gb: float | None = None,
    norms_mb: float = 0.0,
    checkpointing: Checkpointing | None = None,
) -> Iterator[Record]:
    """Train as specified; yield records while it goes on.

    Where there is a checkpoint of this run, it goes on from there, after the records up to it.

    Args:
        spec: what to train, and how.
        memory_gb: most memory of a simulation; by default what is free.
        norms_mb: the most that Norms records may take in a file, which decides how many there are;
            0 for none of them.
        checkpointing: where the run keeps its checkpoint, and how often it makes one; by default
            it makes none. The folder is left behind: whoever has kept the records removes it.
    """
    if spec.engine == "simulated":
        return simulated.run(spec, memory_gb, norms_mb, checkpointing)
    return distributed.run(spec, norms_mb, checkpointing)
