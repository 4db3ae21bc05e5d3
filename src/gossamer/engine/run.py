"""``run``: train a specification on the engine that it names."""

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
    """Train as specified; yield records during training.

    With a checkpoint of this run, yield the records up to it and resume from there.

    Args:
        spec: what to train, and how.
        memory_gb: most memory of a simulation; by default what is free.
        norms_mb: budget of Norms records in a file, which decides how many there are; 0 for none.
        checkpointing: where the run stores its checkpoint, and how often; by default it saves none.
            The caller removes the folder, once it has stored the records.
    """
    if spec.engine == "simulated":
        return simulated.run(spec, memory_gb, norms_mb, checkpointing)
    return distributed.run(spec, norms_mb, checkpointing)
