"""What one worker sends of one bucket, and what it has to know for that."""

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
"""Said once: what, who, and of whom."""


@final
class Outbox:
    """A message, and the range that it is made with.

    Filling it again gives the same message: what it knows changes by what arrives alone, so that a
    state may be taken while the message is on its way.

    Args:
        codec: writes it.
        numel: of the bucket.
        start: what all workers have at the beginning, to be left as it is; it gives the range of
            messages until something of others has been seen, and is not needed afterwards.
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
        """Write the message of a bucket."""
        if self._start is not None:
            self._range = Range(self._codec.first_range(x, self._start))
        self._largest = self._codec.encode(x, self._range.width, self.message)

    def fill_mark(self) -> None:
        """Write that its worker is left out."""
        self._codec.mark(self.message)

    def settle(self, arrivals: Sequence[Arrival]) -> None:
        """Learn from what arrived in an exchange; nothing, as long as nothing has moved."""
        self._range = self._codec.next_range(self._range, self._largest, arrivals)
        if self._range.width > 0:
            self._start = None

    def restart(self, start: Tensor) -> None:
        """Forget the range, as if all workers had these numbers."""
        if self._codec.has_range:
            self._start, self._range = start, Range()

    def state_dict(self) -> dict[str, Any]:
        """Return the range, or what the first one is made of; nothing where none is needed."""
        if not self._codec.has_range:
            return {}
        known = {"range": self._range._asdict()} if self._start is None else {"start": self._start}
        return {"numel": self._numel, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that fits."""
        if "start" in state:
            self.restart(state["start"])
        else:
            self._start, self._range = None, Range(**state["range"])

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of a bucket like this one."""
        return state.get("numel") == self._numel


def load_outboxes(
    outboxes: Sequence[Outbox], states: Sequence[Mapping[str, Any]], buckets: Sequence[Tensor]
) -> None:
    """Let outboxes continue from their states; all anew, where these are of other buckets.

    Workers may then be apart by any distance. Each takes its own numbers for the common start, so
    that at first nothing is decoded, and ranges widen until they are wide enough.

    Args:
        outboxes: of all buckets that have one.
        states: in the same order, of those that have any.
        buckets: their numbers now.
    """
    ranged = [i for i, outbox in enumerate(outboxes) if outbox.state_dict()]
    if not ranged:
        return
    fitting = len(states) == len(ranged) and all(
        outboxes[i].fits(state) for i, state in zip(ranged, states, strict=True)
    )
    if not fitting:
        _log.warning(
            "the state is of other members, another wire or another bucket_mb: ranges start anew, "
            "and where workers differ, the first exchanges are not decoded"
        )
    for index, i in enumerate(ranged):
        if fitting:
            outboxes[i].load_state_dict(states[index])
        else:
            outboxes[i].restart(buckets[i].clone())
