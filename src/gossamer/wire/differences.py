"""What one worker makes of the messages that it gets of one bucket, in one exchange."""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from torch import Tensor

from gossamer.wire.outbox import Outbox
from gossamer.wire.wire import Arrival, Codec, Fate


@final
class Differences:
    """x_i ← x_i + Σ_j w_ij (Q(x_j) − Q(x_i)), message by message.

    Args:
        codec: reads messages.
        outbox: what the worker itself sends.
        x: its bucket, which must stay as it was sent until it is mixed.
        total: memory for the sum.
        self_weight: weight that the worker keeps on its own numbers.
        receivers: who gets what it sends.
        keeps_rest: whether weights sum to one, and that of whoever is left out goes to the worker's
            own numbers; otherwise it is lost.
    """

    def __init__(
        self,
        codec: Codec,
        outbox: Outbox,
        x: Tensor,
        total: Tensor,
        self_weight: float,
        receivers: Collection[int],
        *,
        keeps_rest: bool,
    ) -> None:
        self.left_out: list[int] = []
        """Senders of marks."""
        self.undecoded: list[int] = []
        """Senders whose message could not be decoded, or who cannot decode the worker's."""
        self._receivers = receivers
        self._codec = codec
        self._outbox = outbox
        self._x = x
        self._total = total
        self._keeps_rest = keeps_rest
        self._excess = self_weight - 1  # of the sum of weights over one
        self._arrivals: list[Arrival] = []
        self._is_empty = True

    def take(self, message: Tensor, sender: int, weight: float) -> None:
        """Add the difference of what arrived, unless it is a mark or cannot be decoded."""
        arrival = self._codec.take(
            message,
            self._outbox.message,
            self._x,
            weight,
            self._total,
            first=self._is_empty,
            mutual=sender in self._receivers,
        )
        self._arrivals.append(arrival)
        if arrival.fate is Fate.MARKED:
            self.left_out.append(sender)
        elif arrival.fate is Fate.TAKEN:
            self._is_empty = False
            self._excess += weight
        else:
            self.undecoded.append(sender)

    @property
    def moves_mean(self) -> bool:
        """Whether something was not decoded that came one way: its sender gives, and gets nothing.

        Where two send to each other, neither takes what the other sent.
        """
        return any(sender not in self._receivers for sender in self.undecoded)

    def complete(self) -> None:
        """Make up for weights that do not sum to one, after the last message.

        x_i ← w_ii x_i + Σ_j w_ij Q(x_j) would lose what rounding kept back of the shares that the
        worker gave away; it stays with the worker.
        """
        if not self._keeps_rest:
            self._codec.add_own(
                self._outbox.message, self._excess, self._total, first=self._is_empty
            )
            self._is_empty = False

    def mix(self) -> None:
        """Add the sum, and let the next message learn from what arrived."""
        if not self._is_empty:
            self._x.add_(self._total)
        self._outbox.settle(self._arrivals)
