"""Which tensors share a bucket, and which buckets a step exchanges; the same in both engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from gossamer.errors import UserError

_MEGABYTE = 1e6


def bucket_indices(tensors: Iterable[Tensor], bucket_mb: float) -> list[list[int]]:
    """Return the tensors of each bucket, by index, in their order.

    Args:
        tensors: of one worker. Those of one dtype share buckets.
        bucket_mb: capacity of a bucket in megabytes; a larger tensor gets a bucket of its own.
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
    """The buckets of some tensors, and the buckets that each step exchanges.

    With k fragments, a bucket has at most 1/k of all bytes, or less where that is needed for k
    buckets. Buckets are assigned to the emptiest fragment, the largest bucket first, so that
    fragments have about the same size.

    Args:
        tensors: of one worker.
        bucket_mb: size of a bucket in megabytes.
        fragments: the number of fragments; an exchange is of one of them, in turn.
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
        """Capacity of a bucket in megabytes."""
        filled = sum(tensor.nbytes > 0 for tensor in tensors)
        if filled < fragments > 1:
            raise UserError(
                f"fragments={fragments} needs at least as many parameters, got {filled}; use at "
                f"most fragments={filled}"
            )
        self.buckets = bucket_indices(tensors, self.bucket_mb)
        """The tensors of each bucket, by index."""
        while len(self.buckets) < fragments:  # ends: small enough buckets have one tensor each
            self.bucket_mb /= 2
            self.buckets = bucket_indices(tensors, self.bucket_mb)
        sizes = [sum(tensors[i].nbytes for i in indices) for indices in self.buckets]
        self._fragments = _filled(sizes, fragments)
        self._every = every

    def at(self, step: int) -> Sequence[int]:
        """Return the buckets that a step exchanges, by index."""
        return self._fragments[step // self._every % len(self._fragments)]


def _filled(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Assign each bucket to the emptiest fragment, the largest first; return them by fragment."""
    filled, held = [0] * fragments, [list[int]() for _ in range(fragments)]
    for bucket in sorted(range(len(sizes)), key=lambda bucket: -sizes[bucket]):
        least = filled.index(min(filled))
        filled[least] += sizes[bucket]
        held[least].append(bucket)
    return [sorted(buckets) for buckets in held]
