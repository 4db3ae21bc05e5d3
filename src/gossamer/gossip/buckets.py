"""Parameters as views of flat tensors.

What is sent, received and mixed is a bucket: one flat tensor that holds many parameters of one
dtype and device. A parameter keeps its identity, shape and strides; only its storage moves into
the bucket. So ``state_dict`` keys, optimizers and tied weights know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gossamer.errors import UserError

_ALIGN_BYTES = 64
"""Views start at multiples of this, so that vectorized kernels run on them as on fresh tensors."""


@final
@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """One flat tensor and the names of what it holds."""

    flat: Tensor
    names: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one copy of the bucket."""
        return self.flat.numel() * self.flat.element_size()


def flatten_(named: Iterable[tuple[str, Tensor]], bucket_mb: float) -> list[Bucket]:
    """Move tensors into buckets of about the given size, in their order; return the buckets.

    Args:
        named: names and tensors, each tensor once. Tensors of one dtype and device share buckets.
        bucket_mb: where a bucket is full, in megabytes; a larger tensor gets a bucket of its own.
    """
    return [_move_into_bucket_(part) for part in _partition(named, bucket_mb * 1e6)]


def _partition(
    named: Iterable[tuple[str, Tensor]], most_bytes: float
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield runs of tensors that go into one bucket."""
    open_parts: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, tensor in named:
        kind = tensor.dtype, tensor.device
        size = tensor.numel() * tensor.element_size()
        if open_parts.get(kind) and sizes[kind] + size > most_bytes:
            yield open_parts.pop(kind)
        if kind not in open_parts:
            open_parts[kind], sizes[kind] = [], 0
        open_parts[kind].append((name, tensor))
        sizes[kind] += size
    yield from open_parts.values()


def _move_into_bucket_(named: list[tuple[str, Tensor]]) -> Bucket:
    first = named[0][1]
    align = max(1, _ALIGN_BYTES // first.element_size())
    starts: list[int] = []
    end = 0
    for _, tensor in named:
        starts.append(end)
        end += -(-tensor.numel() // align) * align
    # Zeros, not empty: the padding is sent and averaged with the rest, and must stay finite.
    flat = torch.zeros(end, dtype=first.dtype, device=first.device)
    for start, (name, tensor) in zip(starts, named, strict=True):
        if not _is_dense(tensor):
            raise UserError(
                f"parameters must occupy their memory without gaps or overlap, got {name} with "
                f"shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
                "assign a contiguous copy to it first"
            )
        view = flat.as_strided(tensor.shape, tensor.stride(), start)
        view.copy_(tensor.data)
        tensor.data = view
    return Bucket(flat, tuple(name for name, _ in named))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the strides are those of a contiguous tensor with its dimensions in some order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
