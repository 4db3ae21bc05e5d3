"""What one worker sends of one bucket, and what it has to know for that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor

from gossamer.wire.wire import Arrival, Codec

UNDECODED = (
    "%s %d could not decode a bucket of %s %d, and keeps that weight on its own: they differ by "
    "more than the range of the lattice, which is wider from now on; stats() counts how often"
)
"""Said once: what, who, and of whom."""


@final
class Outbox:
    """A message, and the range that it is made with.

    Args:
        codec: writes it.
        numel: of the bucket.
        start: what all workers have at the beginning; read by the first message, whose range it
            gives, and not needed afterwards.
    """

    def __init__(self, codec: Codec, numel: int, start: Tensor) -> None:
        self.message = codec.new_message(numel)
        self._codec = codec
        self._start: Tensor | None = None
        self._range = 0.0
        self.restart(start)

    @property
    def range(self) -> float:
        """How far apart workers are taken to be; NaN before the first message that needs it."""
        return self._range

    def fill(self, x: Tensor) -> None:
        """Write the message of a bucket."""
        if self._start is not None:
            self._range = self._codec.first_range(x, self._start)
            self._start = None
        self._codec.encode(x, self._range, self.message)

    def fill_mark(self) -> None:
        """Write that its worker is left out."""
        self._codec.mark(self.message)

    def settle(self, arrivals: Sequence[Arrival]) -> None:
        """Learn from what arrived in an exchange."""
        self._range = self._codec.next_range(self._range, arrivals)

    def restart(self, start: Tensor) -> None:
        """Forget the range: all workers have the same numbers again."""
        if self._codec.has_range:
            self._start, self._range = start, math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return the range, or what the first one is made of; nothing where none is needed."""
        if not self._codec.has_range:
            return {}
        return {"range": self._range} if self._start is None else {"start": self._start.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        if not self._codec.has_range:
            return
        if "start" in state:
            self.restart(state["start"].clone())
        else:
            self._start, self._range = None, state["range"]
