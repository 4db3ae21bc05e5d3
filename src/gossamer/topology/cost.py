"""What exchanges cost: which groups all-reduce, and what a ring all-reduce sends.

Nothing else in the library knows either; a Round counts with them.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

from gossamer.topology.arrays import FloatArray, IntArray

SMALLEST_REDUCED = 3
"""Groups of two exchange one message each way: the same bytes as an all-reduce, in one trip."""

Size = TypeVar("Size", int, IntArray)
"""How many workers all-reduce together: in one group, or in the group of each worker."""


def ring_messages(size: Size) -> Size:
    """Return how many messages each of g workers sends: 2(g − 1), a g-th of all bytes each.

    Once around the ring to add up, and once more to hand out the sums.
    """
    return 2 * (size - 1)


@overload
def ring_copies(size: int) -> float: ...
@overload
def ring_copies(size: IntArray) -> FloatArray: ...
def ring_copies(size: Any) -> Any:
    """Return how many copies of what is reduced each of g workers sends: 2(g − 1)/g."""
    return ring_messages(size) / size


def ring_bytes(size: int, num_bytes: int) -> int:
    """Return how many bytes each of g workers sends to reduce so many, rounded down."""
    return ring_messages(size) * num_bytes // size
