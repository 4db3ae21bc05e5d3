"""Workers whose parameters are not finite: how they are found, and what is said of them.

Both engines leave such a worker out of a round: it neither gives nor takes (``Round.without``).
After some rounds in a row they raise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import UserError
from gossamer.topology.arrays import BoolArray

_SUMMED_AS = {torch.float16: torch.float32}
"""For numbers whose sums would often overflow."""


class NonFiniteError(RuntimeError):
    """Parameters have not been finite for too many rounds in a row.

    Args:
        message: whose, and since when.
        workers: those of whom it is said.
    """

    def __init__(self, message: str, workers: Sequence[int]) -> None:
        super().__init__(message)
        self.workers = tuple(workers)


@torch.no_grad()
def finite_workers(tensors: Iterable[Tensor]) -> BoolArray:
    """Return whether all numbers of each worker are finite, [W].

    Args:
        tensors: stacked, [W, ...]; a row per worker.
    """
    flat = [tensor.reshape(len(tensor), -1) for tensor in tensors]
    # One pass that keeps nothing: the sum of finite terms is finite, but for an overflow, and only
    # where it is not is every number looked at.
    sums = [x_WN.sum(1, dtype=_SUMMED_AS.get(x_WN.dtype)) for x_WN in flat]
    finite_W = torch.stack([torch.isfinite(sum_W) for sum_W in sums]).all(0)
    if not finite_W.all():
        finite_W = torch.stack([torch.isfinite(x_WN).all(1) for x_WN in flat]).all(0)
    return finite_W.numpy(force=True)


def check_limit(nonfinite_rounds: int) -> None:
    """Raise unless it is a number of rounds."""
    if nonfinite_rounds < 0:
        raise UserError(
            f"nonfinite_rounds must be at least 0, got {nonfinite_rounds}; 0 never raises, and "
            "leaving it out raises after 10 rounds"
        )


@final
class NonFiniteRounds:
    """Rounds in which workers were left out, counted; says so once for each, and raises.

    Args:
        kind: what a worker is called.
        workers: those whose rounds are counted.
        limit: after so many in a row it raises; 0 for never.
        log: where it is said.
    """

    def __init__(self, kind: str, workers: Sequence[int], limit: int, log: logging.Logger) -> None:
        self._log = log
        self._kind = kind
        self._workers = np.asarray(workers)
        self._limit = limit
        self._in_a_row = np.zeros(len(workers), np.int64)
        self._said: set[int] = set()

    def note(self, finite: BoolArray, step: int) -> None:
        """Take in one round; raise where it is the last that a worker may be left out of.

        Args:
            finite: whether each worker's parameters are.
            step: the step that the round is of.
        """
        if finite.all() and not self._in_a_row.any():
            return
        self._in_a_row = np.where(finite, 0, self._in_a_row + 1)
        self.say(self._workers[~finite].tolist(), step)
        if self._limit and (self._in_a_row >= self._limit).any():
            stopped: list[int] = self._workers[self._in_a_row >= self._limit].tolist()
            raise NonFiniteError(
                f"parameters must be finite, got those of {self._named(stopped)}, which were not "
                f"in {self._limit} rounds in a row up to step {step}; lower the learning rate, "
                "clip gradients, or go on from a checkpoint before that",
                stopped,
            )

    def say(self, workers: Iterable[int], step: int) -> None:
        """Log that workers are left out, once for each."""
        new = sorted({*workers} - self._said)
        self._said.update(new)
        if new:
            self._log.warning(
                "the parameters of %s are not finite at step %d: nobody mixes with them, and others"
                " keep that weight on their own",
                self._named(new),
                step,
            )

    def _named(self, workers: Sequence[int]) -> str:
        return f"{self._kind}{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
