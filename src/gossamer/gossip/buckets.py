"""Parameters as views of flat tensors.

Buckets are sent, received and mixed: flat tensors that each hold many parameters of one dtype. A
parameter keeps its identity, shape and strides; only its storage moves into the bucket. So
``state_dict`` keys, optimizers and tied weights are not affected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gossamer.wire import bucket_indices

_ALIGN_BYTES = 64
"""Views start at multiples of this, so that vectorized kernels run on them as on fresh tensors."""


def flatten_(tensors: Iterable[Tensor], bucket_mb: float, slices: int = 1) -> list[Tensor]:
    """Move dense tensors into buckets of about the given size, in their order; return the buckets.

    Args:
        tensors: without duplicates, all on one device. Those of one dtype share buckets.
        bucket_mb: capacity of a bucket in megabytes; a larger tensor gets a bucket of its own.
        slices: pad each bucket so that it splits into this many aligned slices of equal length.
    """
    tensors = [*tensors]
    buckets = bucket_indices(tensors, bucket_mb)
    return [_move_into_bucket_([tensors[i] for i in indices], slices) for indices in buckets]


def unflatten_(tensors: Iterable[Tensor]) -> None:
    """Move tensors out of their buckets, into storage of their own."""
    for tensor in tensors:
        tensor.data = tensor.data.clone()  # keeps the strides of dense tensors


def is_dense(tensor: Tensor) -> bool:
    """Whether the strides are those of a contiguous tensor with its dimensions in some order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _move_into_bucket_(tensors: Sequence[Tensor], slices: int) -> Tensor:
    align = max(1, _ALIGN_BYTES // tensors[0].element_size())
    starts: list[int] = []
    end = 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() // align) * align
    # Zeros, not empty: the padding is sent and averaged with the rest, and must stay finite. A
    # bucket of empty tensors has padding too, as every bucket must be able to hold a mark.
    length = -(-max(end, align) // (slices * align)) * slices * align
    flat = torch.zeros(length, dtype=tensors[0].dtype, device=tensors[0].device)
    for start, tensor in zip(starts, tensors, strict=True):
        view = flat.as_strided(tensor.shape, tensor.stride(), start)
        view.copy_(tensor.data)
        tensor.data = view
    return flat
