"""The exchange of one bucket in a round, while it is in flight and when it has arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Self, final

from torch import Tensor

from gossamer.gossip.marks import marked


class InFlight:
    """The pending waits of an exchange, and the ranks that were left out of it."""

    def __init__(self) -> None:
        self.left_out: list[int] = []
        """Ranks that sent marks in place of parameters."""
        self._waits: deque[Callable[[], object]] = deque()

    def after(self, waits: Iterable[Callable[[], object]]) -> Self:
        """Append functions that wait, to be called in this order; return itself."""
        self._waits.extend(waits)
        return self

    def wait(self) -> None:
        """Block until the inbox is filled and the source may change."""
        while self._waits:
            self._waits[0]()
            # Removed only if it did not raise, and then never called again: a second wait on Gloo's
            # work would block for a second message.
            self._waits.popleft()

    def drop(self) -> None:
        """Release the pending waits, which would keep connections open."""
        self._waits.clear()

    def take(self, received: Tensor, sender: int, weight: float) -> None:
        """Add a message to the mix."""
        raise NotImplementedError

    def complete(self) -> None:
        """Run after the last message was added, on the thread that added it."""
        return


@final
class Exchange(InFlight):
    """The exchange of one full bucket, by messages or by an all-reduce.

    Args:
        self_weight: weight that the worker keeps on its own parameters.
        inbox: receives the weighted mean of its neighbours; from an all-reduce, the mean of the
            group, which includes the worker's own share.
        all_or_none: whether nothing is mixed if one of the neighbours is left out.
        keeps_rest: whether the weight of a rank that is left out goes to the worker's own
            parameters; if rows do not sum to one, it is lost.
    """

    def __init__(
        self, self_weight: float, inbox: Tensor, *, all_or_none: bool, keeps_rest: bool = True
    ) -> None:
        super().__init__()
        self.includes_self = False
        """Whether the inbox includes the worker's own share."""
        self._inbox = inbox
        self._kept = self_weight
        self._all_or_none = all_or_none
        self._keeps_rest = keeps_rest
        self.received_weight = 0.0
        """The total weight of the neighbours in the inbox."""

    @property
    def sums_to_one(self) -> bool:
        """Whether the worker's own weight and those of its neighbours sum to one."""
        return self._keeps_rest

    @property
    def self_weight(self) -> float:
        """The weight that the worker keeps on its own parameters, with that of ranks left out."""
        if not self._keeps_rest:
            return self._kept
        # With nothing but marks received, the inbox may hold one: any weight on it spreads NaN.
        only_marks = not self.includes_self and not self.received_weight
        return 1.0 if only_marks or (self.left_out and self._all_or_none) else self._kept

    def take(self, received: Tensor, sender: int, weight: float) -> None:
        """Add a message to the mean of the neighbours, unless it is a mark."""
        if marked(received, [sender]):
            self.left_out.append(sender)
            self._kept += weight if self._keeps_rest else 0.0
            return
        self.received_weight += weight
        if self.received_weight > weight:  # not the first: update the running mean
            self._inbox.lerp_(received, weight / self.received_weight)
        elif received is not self._inbox:
            self._inbox.copy_(received)

    def take_sum(self, members: Sequence[int]) -> None:
        """Accept the inbox as the mean of these ranks, unless there are marks in it."""
        self.left_out = marked(self._inbox, members)
        self.includes_self = not self.left_out
