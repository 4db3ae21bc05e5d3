"""Which tensors travel together: the same buckets on ranks and in a simulation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gossamer.errors import UserError

MEGABYTE = 1e6


def check_bucket(bucket_mb: float) -> None:
    """Raise where a bucket would hold nothing."""
    if not bucket_mb > 0:
        raise UserError(f"bucket_mb must be above 0, got {bucket_mb}; leave it out for the default")


def bucket_indices(tensors: Iterable[Tensor], most_bytes: float) -> list[list[int]]:
    """Return which tensors go into each bucket, by index, in their order.

    Args:
        tensors: of one worker. Those of one dtype share buckets.
        most_bytes: where a bucket is full; a larger tensor gets one of its own.
    """
    buckets: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        bucket, filled = filling.get(tensor.dtype, ([], 0))
        if not bucket or filled + tensor.nbytes > most_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filling[tensor.dtype] = bucket, filled + tensor.nbytes
    return buckets
