"""Detect and report workers whose parameters are not finite, or grow absurdly.

Both engines leave a worker whose parameters are not finite out of a round: it neither sends nor
receives (``Round.without``), and after a number of consecutive rounds they raise. Absurd growth is
only reported.
"""

# W: workers, N: numbers per worker, T: tensors, S: suspects

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import UserError
from gossamer.topology.arrays import BoolArray, FloatArray

_MEASURED_AS = {torch.float16: torch.float32}
"""Accumulate norms of these types in a wider one: their squares overflow."""

_PARAMETERS = "parameters"

_ABSURD_GROWTH = 10.0
"""Growth of parameters in one step that never occurs in stable training."""


class NonFiniteError(RuntimeError):
    """Parameters were not finite in too many consecutive rounds.

    Args:
        message: names the workers and the step.
        workers: those whose parameters are not finite.
    """

    def __init__(self, message: str, workers: Sequence[int]) -> None:
        super().__init__(message)
        self.workers = tuple(workers)


@torch.no_grad()
def measured_norms(tensors: Iterable[Tensor]) -> FloatArray:
    """Return the L2 norm of each worker's parameters, [W]; NaN if one of them is not finite.

    Args:
        tensors: stacked, [W, ...]; a row per worker.
    """
    flat = [tensor.reshape(len(tensor), tensor[0].numel()) for tensor in tensors]
    # A single pass without temporaries: a finite norm implies finite numbers.
    norms_TW = torch.stack([_norms(x_WN).double() for x_WN in flat])
    norms_W = torch.linalg.vector_norm(norms_TW, dim=0)
    suspects = (~norms_W.isfinite()).nonzero().flatten()
    if len(suspects):  # the squares may have overflowed; 0 · x is NaN only for non-finite x
        zeros_TS = torch.stack([(x_WN[suspects] * 0).sum(1).double() for x_WN in flat])
        norms_W[suspects] += zeros_TS.sum(0)
    return norms_W.numpy(force=True)


def _norms(x_WN: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_WN, dim=1, dtype=_MEASURED_AS.get(x_WN.dtype))


def check_limit(nonfinite_rounds: int) -> None:
    """Raise on a negative number of rounds."""
    if nonfinite_rounds < 0:
        raise UserError(
            f"nonfinite_rounds must be at least 0, got {nonfinite_rounds}; 0 never raises, and "
            "the default raises after 10 rounds"
        )


@final
class ParameterWatch:
    """Monitors the norms of workers from round to round; warns once per worker and problem.

    Args:
        kind: the word for a worker in messages.
        workers: those that are monitored.
        norms: of their initial parameters.
        limit: raise after so many consecutive rounds in which one was not finite; 0 for never.
        log: for warnings.
        what: the tensors in messages, a plural.
    """

    def __init__(
        self,
        kind: str,
        workers: Sequence[int],
        norms: FloatArray,
        limit: int,
        log: logging.Logger,
        what: str = _PARAMETERS,
    ) -> None:
        self._kind = kind
        self._workers = np.asarray(workers)
        self._limit = limit
        self._log = log
        self._what = what
        self._norms = norms
        self._in_a_row = np.zeros(len(workers), np.int64)
        self._said: set[tuple[str, int]] = set()

    def look(self, norms: FloatArray, step: int) -> BoolArray:
        """Return which workers are finite in a round.

        Args:
            norms: of each worker's parameters, NaN if they are not finite.
            step: the step of the round.

        Raises:
            NonFiniteError: a worker was not finite in too many consecutive rounds.
        """
        self._look_at_growth(norms, step)
        finite = ~np.isnan(norms)
        self._in_a_row = np.where(finite, 0, self._in_a_row + 1)
        self.say_left_out(self._workers[~finite].tolist(), step)
        if self._limit and (self._in_a_row >= self._limit).any():
            stopped: list[int] = self._workers[self._in_a_row >= self._limit].tolist()
            raise NonFiniteError(
                f"{self._what} must be finite, got those of {self._named(stopped)}, which were not "
                f"{self._when(step)}; lower the learning rate, clip gradients, or resume from "
                "an earlier checkpoint",
                stopped,
            )
        return finite

    def forget_norms(self) -> None:
        """Skip the check of growth in the next round, after parameters were replaced."""
        self._norms = np.zeros_like(self._norms)

    def say_left_out(self, workers: Iterable[int], step: int) -> None:
        """Log that workers are left out, once for each."""
        if new := self._unsaid("left out", workers):
            self._log.warning(
                "the %s of %s are not finite at step %d: the round leaves them out, and neighbours"
                " keep that weight on their own parameters",
                self._what,
                self._named(new),
                step,
            )

    def _look_at_growth(self, norms: FloatArray, step: int) -> None:
        before, self._norms = self._norms, norms
        if self._what != _PARAMETERS:  # gradients, and state derived from them, may grow
            return
        absurd = (before > 0) & (norms > _ABSURD_GROWTH * before)  # False for NaN
        for worker in self._unsaid("grown", self._workers[absurd].tolist()):
            (place,) = np.flatnonzero(self._workers == worker)
            self._log.warning(
                "the %s of %s %d have grown from a norm of %.3g to %.3g in one step, at "
                "step %d: other workers mix with them; check its learning rate, gradients and data",
                self._what,
                self._kind,
                worker,
                before[place],
                norms[place],
                step,
            )

    def _unsaid(self, what: str, workers: Iterable[int]) -> list[int]:
        """Return the workers without this warning so far, and mark them as warned."""
        new = sorted(worker for worker in workers if (what, worker) not in self._said)
        self._said.update((what, worker) for worker in new)
        return new

    def _when(self, step: int) -> str:
        in_a_row = f"in {self._limit} rounds in a row up to step {step}"
        return f"at step {step}" if self._limit == 1 else in_a_row

    def _named(self, workers: Sequence[int]) -> str:
        return f"{self._kind}{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
