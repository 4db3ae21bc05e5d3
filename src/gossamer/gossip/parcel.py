"""Coded exchanges of one bucket: its encoded message, and the decoding of others' messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from gossamer.gossip.exchange import InFlight
from gossamer.wire import Codec, Differences, Outbox


@final
class Parcel:
    """The memory of one bucket's coded exchanges, from round to round.

    Args:
        bucket: the bucket to exchange; it must not change while an exchange is in flight.
        codec: encodes and decodes messages.
    """

    def __init__(self, bucket: Tensor, codec: Codec) -> None:
        self.bucket = bucket
        self.codec = codec
        self.total = torch.empty_like(bucket, dtype=codec.work)
        """The sum of differences."""
        self.outbox = Outbox(codec, bucket.numel(), bucket.clone())
        self.incoming = torch.empty_like(self.outbox.message)


@final
class CodedExchange(InFlight):
    """The exchange of one bucket by encoded messages.

    Args:
        parcel: its memory.
        self_weight: weight that the worker keeps on its own parameters.
        receivers: the ranks that receive its message.
        keeps_rest: as of ``Differences``.
        marks: whether this rank is left out, and sends a mark.
    """

    def __init__(
        self,
        parcel: Parcel,
        self_weight: float,
        receivers: Sequence[int],
        *,
        keeps_rest: bool,
        marks: bool,
    ) -> None:
        super().__init__()
        self.parcel = parcel
        self._marks = marks
        self._differences = Differences(
            parcel.codec,
            parcel.outbox,
            parcel.bucket,
            parcel.total,
            self_weight,
            receivers,
            keeps_rest=keeps_rest,
        )
        self.left_out = self._differences.left_out
        self.undecoded = self._differences.undecoded
        """Ranks whose message could not be decoded."""

    @property
    def moves_mean(self) -> bool:
        """As of ``Differences``."""
        return self._differences.moves_mean

    def fill(self) -> Tensor:
        """Encode this rank's message, and return it."""
        outbox = self.parcel.outbox
        outbox.fill_mark() if self._marks else outbox.fill(self.parcel.bucket)
        return outbox.message

    def take(self, received: Tensor, sender: int, weight: float) -> None:
        """Add the difference of a message, unless this rank is left out."""
        if not self._marks:
            self._differences.take(received, sender, weight)

    def complete(self) -> None:
        """Run after the last message was added."""
        if not self._marks:
            self._differences.complete()

    def mix(self) -> None:
        """Mix the bucket, unless this rank is left out."""
        if not self._marks:
            self._differences.mix()
