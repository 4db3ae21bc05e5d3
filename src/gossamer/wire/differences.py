"""The mixing of one bucket with the encoded messages of one exchange, at one worker."""

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
        codec: decodes messages.
        outbox: the worker's own message.
        x: its bucket, which must not change between sending and mixing.
        total: memory for the sum.
        self_weight: weight that the worker keeps on its own numbers.
        receivers: the workers that receive its message.
        keeps_rest: whether weights sum to one, so that the weight of a worker that is left out goes
            to this worker's own numbers; otherwise that weight is lost.
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
        """Senders whose message could not be decoded, or that cannot decode the worker's."""
        self._receivers = receivers
        self._codec = codec
        self._outbox = outbox
        self._x = x
        self._total = total
        self._keeps_rest = keeps_rest
        self._excess = self_weight - 1  # the sum of weights, minus one
        self._arrivals: list[Arrival] = []
        self._is_empty = True

    def take(self, message: Tensor, sender: int, weight: float) -> None:
        """Add the weighted difference of a message, unless it is a mark or cannot be decoded."""
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
            self._excess += weight  # of mixed messages only: the weight of others is lost
        else:
            self.undecoded.append(sender)

    @property
    def moves_mean(self) -> bool:
        """Whether a message was not decoded whose sender receives none from this worker.

        If two workers send to each other, both mix the other's message or neither does, which
        conserves the mean.
        """
        return any(sender not in self._receivers for sender in self.undecoded)

    def complete(self) -> None:
        """Correct for weights that do not sum to one, after the last message.

        x_i ← w_ii x_i + Σ_j w_ij Q(x_j) would lose x_i − Q(x_i) of the shares that the worker sent
        away. Here the worker keeps that rounding error, so the sum over workers is conserved.
        """
        if not self._keeps_rest:
            self._codec.add_own(
                self._outbox.message, self._excess, self._total, first=self._is_empty
            )
            self._is_empty = False

    def mix(self) -> None:
        """Add the sum to the bucket, and update the range of the next message."""
        if not self._is_empty:  # otherwise the memory of the sum is uninitialized
            self._x.add_(self._total)
        # Only now, on the training thread: a state saved while messages are in flight must have
        # the range that they were encoded with.
        self._outbox.settle(self._arrivals)
