"""Which of a run's norms are stored: as many as fit the file's budget, at equal intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

from gossamer.consensus import NormSteps
from gossamer.engine.spec import CENTRALIZED, RunSpec
from gossamer.records import Norms
from gossamer.topology.arrays import FloatArray

BYTES_PER_NORM = 9
"""Per norm in a columnar file: eight, plus the columns for step, tensor and worker."""

OVERHEAD = 16_384
"""Bytes of a nearly empty file."""


class _Measured(Protocol):
    @property
    def last_norms(self) -> FloatArray | None: ...


@final
class KeptNorms:
    """The norms of a run that are yielded among its records.

    The choice depends on the specification only, so that a resumed run stores the same ones.

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
            # An interval must be a multiple of log_every: its last mixed step is then also the last
            # of a shorter interval, at which norms have been measured.
            self._steps = NormSteps(spec.schedule, spec.make_algorithm().overlaps, self.every)

    def after(self, step: int, mixing: _Measured | None) -> Norms | None:
        """Return the norms measured in the interval that ends here, where they are stored."""
        if mixing is None or step - 1 not in self._steps:
            return None
        assert mixing.last_norms is not None, "norms are measured where they are kept"
        norms = mixing.last_norms.tolist()
        return Norms(step=step, every=self.every, tensors=self._tensors, norms=norms)


def interval(spec: RunSpec, num_tensors: int, norms_mb: float) -> int:
    """Return the steps between two stored norms: ``log_every``, or a multiple that fits.

    Args:
        spec: of the run; budgets that may end it early are ignored.
        num_tensors: how many are trained.
        norms_mb: the most that all of them may take in a file.
    """
    per_step = BYTES_PER_NORM * num_tensors * spec.workers
    most = max(0, int((norms_mb * 1e6 - OVERHEAD) // per_step))
    logged = spec.num_steps // spec.log_every
    return spec.log_every * max(1, -(-logged // most)) if most else 0
