"""One bucket's part of a round, while it is in flight and when it has arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Self, final

from torch import Tensor

from gossamer.gossip.marks import marked


class InFlight:
    """What has to be waited for, and who was left out."""

    def __init__(self) -> None:
        self.left_out: list[int] = []
        """Ranks that sent marks in place of parameters."""
        self._waits: deque[Callable[[], object]] = deque()

    def after(self, waits: Iterable[Callable[[], object]]) -> Self:
        """Return itself, with what has to be waited for, in this order."""
        self._waits.extend(waits)
        return self

    def wait(self) -> None:
        """Return when the inbox is filled and the source may change again."""
        while self._waits:
            self._waits[0]()
            self._waits.popleft()  # each only once: Gloo would wait for a second message

    def drop(self) -> None:
        """Let go of what is waited for: it refers to this object, and would hold connections."""
        self._waits.clear()

    def take(self, received: Tensor, sender: int, weight: float) -> None:
        """Let what arrived join the mix."""
        raise NotImplementedError

    def complete(self) -> None:
        """Come after the last message was taken, on the thread that took them."""
        return


@final
class Exchange(InFlight):
    """One bucket's exchange: what its messages and its all-reduce come to.

    Args:
        self_weight: weight that the worker keeps on its own parameters.
        inbox: receives the mean of its neighbours; where it is reduced, the whole mix, the
            worker's own part included.
        all_or_none: whether nobody is mixed with where one of them is left out.
        keeps_rest: whether the weight of whoever is left out goes to the worker's own parameters;
            where rows do not sum to one, it is lost.
    """

    def __init__(
        self, self_weight: float, inbox: Tensor, *, all_or_none: bool, keeps_rest: bool = True
    ) -> None:
        super().__init__()
        self.includes_self = False
        """Whether the inbox has the whole mix, the worker's own part included."""
        self._inbox = inbox
        self._kept = self_weight
        self._all_or_none = all_or_none
        self._keeps_rest = keeps_rest
        self.received_weight = 0.0
        """Of the mean in the inbox."""

    @property
    def sums_to_one(self) -> bool:
        """Whether the worker's own weight and those of its neighbours do."""
        return self._keeps_rest

    @property
    def self_weight(self) -> float:
        """The weight that the worker keeps on its own parameters, after what was left out."""
        if not self._keeps_rest:
            return self._kept
        nothing_came = not self.includes_self and not self.received_weight  # or it holds a mark
        return 1.0 if nothing_came or (self.left_out and self._all_or_none) else self._kept

    def take(self, received: Tensor, sender: int, weight: float) -> None:
        """Let what arrived join the mean of the neighbours, unless it is a mark."""
        if marked(received, [sender]):
            self.left_out.append(sender)
            self._kept += weight if self._keeps_rest else 0.0
            return
        self.received_weight += weight
        if self.received_weight > weight:  # a mean grows by lerp_
            self._inbox.lerp_(received, weight / self.received_weight)
        elif received is not self._inbox:
            self._inbox.copy_(received)

    def take_sum(self, members: Sequence[int]) -> None:
        """Take the inbox for the mean of these ranks, unless there are marks in it."""
        self.left_out = marked(self._inbox, members)
        self.includes_self = not self.left_out
