"""Which tensors travel together, and when: the same buckets on ranks and in a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from gossamer.errors import UserError

_MEGABYTE = 1e6


def bucket_indices(tensors: Iterable[Tensor], bucket_mb: float) -> list[list[int]]:
    """Return which tensors go into each bucket, by index, in their order.

    Args:
        tensors: of one worker. Those of one dtype share buckets.
        bucket_mb: where a bucket is full, in megabytes; a larger tensor gets one of its own.
    """
    buckets: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        bucket, filled = filling.get(tensor.dtype, ([], 0))
        if not bucket or filled + tensor.nbytes > bucket_mb * _MEGABYTE:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filling[tensor.dtype] = bucket, filled + tensor.nbytes
    return buckets


@final
class Packing:
    """The buckets of some tensors, and which of them each step exchanges.

    Where an exchange is of one of k fragments, a bucket is at most a k-th of all, or as small as it
    takes for k of them, and fragments are filled with buckets, the largest first, so that they are
    about as large as each other.

    Args:
        tensors: of one worker.
        bucket_mb: size of a bucket in megabytes.
        fragments: of which each exchange is one in turn.
        every: steps from one exchange to the next.
    """

    def __init__(
        self, tensors: Sequence[Tensor], bucket_mb: float, fragments: int = 1, every: int = 1
    ) -> None:
        if not bucket_mb > 0:
            raise UserError(
                f"bucket_mb must be above 0, got {bucket_mb}; leave it out for the default"
            )
        share = sum(tensor.nbytes for tensor in tensors) / fragments / _MEGABYTE
        self.bucket_mb = min(bucket_mb, share) if fragments > 1 else bucket_mb
        """Where a bucket is full."""
        filled = sum(tensor.nbytes > 0 for tensor in tensors)
        if filled < fragments > 1:
            raise UserError(
                f"fragments={fragments} need as many parameters, got {filled}; use at most "
                f"fragments={filled}"
            )
        self.buckets = bucket_indices(tensors, self.bucket_mb)
        """Tensors by index, of each bucket."""
        while len(self.buckets) < fragments:  # one tensor each, at last
            self.bucket_mb /= 2
            self.buckets = bucket_indices(tensors, self.bucket_mb)
        sizes = [sum(tensors[i].nbytes for i in indices) for indices in self.buckets]
        self._fragments = _filled(sizes, fragments)
        self._every = every

    def at(self, step: int) -> Sequence[int]:
        """Return the buckets that the exchange of a step is of, by index."""
        return self._fragments[step // self._every % len(self._fragments)]


def _filled(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Return the buckets of each fragment, in their order."""
    filled, held = [0] * fragments, [list[int]() for _ in range(fragments)]
    for bucket in sorted(range(len(sizes)), key=lambda bucket: -sizes[bucket]):
        least = filled.index(min(filled))
        filled[least] += sizes[bucket]
        held[least].append(bucket)
    return [sorted(buckets) for buckets in held]
