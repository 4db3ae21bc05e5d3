"""What exchanges cost: which groups all-reduce, and what a ring all-reduce sends.

The only place that decides either, so that transport, simulator and runtime model count alike.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

from gossamer.topology.arrays import FloatArray, IntArray

SMALLEST_REDUCED = 3
"""Groups of two exchange point to point: the same bytes as an all-reduce, in one message each."""

Size = TypeVar("Size", int, IntArray)
"""How many workers all-reduce together: in one group, or in the group of each worker."""


def ring_messages(size: Size) -> Size:
    """Return how many messages each of g workers sends: 2(g − 1), each 1/g of the tensor.

    g − 1 for the reduce-scatter, and g − 1 for the all-gather.
    """
    return 2 * (size - 1)


@overload
def ring_copies(size: int) -> float: ...
@overload
def ring_copies(size: IntArray) -> FloatArray: ...
def ring_copies(size: Any) -> Any:
    """Return how many times the reduced tensor's size each of g workers sends: 2(g − 1)/g."""
    return ring_messages(size) / size


def ring_bytes(size: int, num_bytes: int) -> int:
    """Return how many bytes each of g workers sends to reduce ``num_bytes``, rounded down."""
    return ring_messages(size) * num_bytes // size
