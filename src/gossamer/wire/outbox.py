"""One worker's message of one bucket, and the range that it is encoded with."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor

from gossamer.wire.wire import Arrival, Codec, Range

_log = logging.getLogger(__name__)

UNDECODED = (
    "%s %d could not decode a bucket of %s %d, and keeps that weight on its own: they differ by "
    "more than the range of the lattice, which is wider from now on; stats() counts how often"
)
"""Logged once: 'rank' or 'worker' and index of the receiver, then of the sender."""


@final
class Outbox:
    """A message, and the range that it is encoded with.

    Encoding the same bucket twice gives the same message: only arrivals change the range. So a
    state may be saved while the message is in flight.

    Args:
        codec: encodes the message.
        numel: number of elements of the bucket.
        start: the initial values, equal on all workers; must not be modified. Until something has
            arrived the range is computed from the distance to them, afterwards it is not.
    """

    def __init__(self, codec: Codec, numel: int, start: Tensor) -> None:
        self.message = codec.new_message(numel)
        self._numel = numel
        self._codec = codec
        self._start: Tensor | None = None
        self._range = Range()
        self._largest = 0.0
        self.restart(start)

    def fill(self, x: Tensor) -> None:
        """Encode a bucket into the message."""
        # The distance from the start grows with every step until something arrives: a range of an
        # earlier step could be too narrow.
        if self._start is not None:
            self._range = Range(self._codec.first_range(x, self._start))
        self._largest = self._codec.encode(x, self._range.width, self.message)

    def fill_mark(self) -> None:
        """Encode a mark: this worker is left out."""
        self._codec.mark(self.message)

    def settle(self, arrivals: Sequence[Arrival]) -> None:
        """Update the range from the arrivals of an exchange; it stays zero until numbers differ."""
        self._range = self._codec.next_range(self._range, self._largest, arrivals)
        if self._range.width > 0:  # not while all are equal, as at a rate of 0: nothing is learnt
            self._start = None

    def restart(self, start: Tensor) -> None:
        """Reset the range, as if all workers had these numbers."""
        if self._codec.has_range:
            self._start, self._range = start, Range()

    def state_dict(self) -> dict[str, Any]:
        """Return the range, or the start that the first range needs; {} for a codec without one."""
        if not self._codec.has_range:
            return {}
        known = {"range": self._range._asdict()} if self._start is None else {"start": self._start}
        return {"numel": self._numel, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that fits."""
        if "start" in state:
            self.restart(state["start"])
        else:
            self._start, self._range = None, Range(**state["range"])

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of a bucket of this size."""
        return state.get("numel") == self._numel


def load_outboxes(
    outboxes: Sequence[Outbox], states: Sequence[Mapping[str, Any]], buckets: Sequence[Tensor]
) -> None:
    """Load the states of outboxes; reset all of them if the states are of other buckets.

    After a reset workers may be any distance apart. Each takes its own numbers for the common
    start, so the first messages are not decoded, and ranges widen until they are.

    Args:
        outboxes: of all buckets that have one.
        states: in the same order, of the outboxes that have a range.
        buckets: the current numbers.
    """
    ranged = [i for i, outbox in enumerate(outboxes) if outbox.state_dict()]
    if not ranged:
        return
    fitting = len(states) == len(ranged) and all(
        outboxes[i].fits(state) for i, state in zip(ranged, states, strict=True)
    )
    if not fitting:
        _log.warning(
            "the state is of other members, another wire or another bucket_mb: ranges are reset, "
            "and if workers differ, the first exchanges are not decoded"
        )
    for index, i in enumerate(ranged):
        if fitting:
            outboxes[i].load_state_dict(states[index])
        else:
            outboxes[i].restart(buckets[i].clone())
