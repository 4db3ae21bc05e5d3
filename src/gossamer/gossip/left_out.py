"""Detection of ranks that are left out of a round, because their parameters are not finite."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import final

from torch import Tensor

from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.marks import mark_like
from gossamer.gossip.telemetry import Telemetry
from gossamer.gossip.within import Within
from gossamer.nonfinite import NonFiniteError, ParameterWatch, measured_norms
from gossamer.topology import Round
from gossamer.topology.arrays import FloatArray

_log = logging.getLogger(__name__)


@final
class LeftOut:
    """Checks that buckets are finite before they are sent, and counts ranks left out of rounds.

    Args:
        what: the name of what is sent, a plural.
        buckets: the buckets before the first step.
        rank: this rank.
        limit: raise after this rank was left out of so many rounds in a row; 0 for never.
        detector: reports the error to other ranks.
        telemetry: counts ranks left out.
        within: the ranks that hold the rest of the worker's parameters. If one of them is not
            finite, all are left out, because a replica is mixed as a unit.
    """

    def __init__(
        self,
        what: str,
        buckets: Sequence[Tensor],
        rank: int,
        limit: int,
        detector: FailureDetector,
        telemetry: Telemetry,
        within: Within | None = None,
    ) -> None:
        self._within = within or Within()
        self.is_self = False
        """Whether this rank is left out of the last round that was started."""
        self._rank = rank
        self._watch = ParameterWatch("rank", [rank], self._norms(buckets), limit, _log, what)
        self._detector = detector
        self._telemetry = telemetry
        self._round: Round | None = None
        self._step = 0
        self._sent: Sequence[Tensor] = ()

    def sound_or_marks(
        self, buckets: Sequence[Tensor], round: Round, step: int
    ) -> Sequence[Tensor]:
        """Return the tensors to send in a round: the buckets, or marks if one is not finite.

        Raises:
            NonFiniteError: this rank was left out of too many rounds in a row.
        """
        self._within.at(step)
        try:
            finite = self._watch.look(self._norms(buckets), step)
        except NonFiniteError as error:
            self._detector.give_up(error)
            raise
        self.is_self = not finite.all()
        self._round, self._step = round, step
        # Kept alive until the next round: marks are in flight.
        self._sent = [mark_like(b, self._rank) for b in buckets] if self.is_self else buckets
        return self._sent

    def forget_norms(self) -> None:
        """Skip the check of growth in the next round: parameters have been replaced."""
        self._watch.forget_norms()

    def count(self, marked: Iterable[Sequence[int]], *, mean_moves: bool) -> None:
        """Count the ranks left out of a finished round, and whether it moved the mean.

        Args:
            marked: for each bucket, the ranks whose marks may be in it.
            mean_moves: whether the round moved the mean for another reason.
        """
        # A bucket with fewer elements than ranks may name too many; a left-out rank is in all.
        ranks = set.intersection(*map(set, marked)) | ({self._rank} if self.is_self else set())
        if ranks and self._round is not None:
            self._watch.say_left_out(ranks, self._step)
            self._telemetry.left_out.update(ranks)
            mean_moves = mean_moves or not self._round.symmetric
        self._telemetry.mean_moved += mean_moves

    def _norms(self, buckets: Sequence[Tensor]) -> FloatArray:
        norms = measured_norms([bucket.unsqueeze(0) for bucket in buckets])
        return self._within.norms(norms, "the check of parameters")
