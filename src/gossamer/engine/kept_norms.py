"""Which of a run's norms are kept: as many as a file may be large, at even distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

from gossamer.consensus import NormSteps
from gossamer.engine.spec import CENTRALIZED, RunSpec
from gossamer.records import Norms
from gossamer.topology.arrays import FloatArray

BYTES_PER_NORM = 9
"""In a columnar file: eight, and what it takes to say of which step, tensor and worker it is."""

OVERHEAD = 16_384
"""Bytes of a file that holds next to nothing."""


class _Measured(Protocol):
    @property
    def last_norms(self) -> FloatArray | None: ...


@final
class KeptNorms:
    """The norms of a run that are yielded among its records.

    Which ones follows from the specification alone: a run that goes on after a kill keeps the same.

    Args:
        spec: of the run.
        tensors: names, in the order of the norms.
        norms_mb: the most that they may take in a file; 0 for none.
    """

    def __init__(self, spec: RunSpec, tensors: Sequence[str], norms_mb: float) -> None:
        self.every = 0
        """Steps between two of them, a multiple of ``log_every``; 0 where there are none."""
        self._tensors = list(tensors)
        if spec.topology != CENTRALIZED:
            self.every = interval(spec, len(tensors), norms_mb)
            # The last step of a longer interval that is mixed is also that of a shorter one, so
            # what is kept has been measured.
            self._steps = NormSteps(spec.schedule, spec.make_algorithm().overlaps, self.every)

    def after(self, step: int, mixing: _Measured | None) -> Norms | None:
        """Return the norms of the last of so many steps, where they are kept."""
        if mixing is None or step - 1 not in self._steps:
            return None
        assert mixing.last_norms is not None, "norms are measured where they are kept"
        norms = mixing.last_norms.tolist()
        return Norms(step=step, every=self.every, tensors=self._tensors, norms=norms)


def interval(spec: RunSpec, num_tensors: int, norms_mb: float) -> int:
    """Return the steps between two norms that are kept: ``log_every``, or a multiple that fits.

    Args:
        spec: of the run; a budget that ends it early has no part in this.
        num_tensors: how many are trained.
        norms_mb: the most that all of them may take in a file.
    """
    per_step = BYTES_PER_NORM * num_tensors * spec.workers
    most = max(0, int((norms_mb * 1e6 - OVERHEAD) // per_step))
    logged = spec.num_steps // spec.log_every
    return spec.log_every * max(1, -(-logged // most)) if most else 0
