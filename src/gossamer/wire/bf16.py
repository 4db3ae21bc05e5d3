"""Two bytes per number: each is rounded to the nearest bfloat16.

    x_i + Σ_j w_ij (bf16(x_j) − bf16(x_i))

It encodes any state, however far apart workers are. An all-reduce sums along its ring, and rounding
every partial sum would move the mean; so groups that all-reduce send full precision.

Numbers are clamped to ±2^126, so that no difference of two sent numbers overflows. Without that, a
number close to 2^128 would be rounded to infinity.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from gossamer.wire.wire import BLOCK, CODED_BUCKET_MB, Arrival, Codec, Fate, Wire

_LARGEST = 2.0**126


@final
class Bf16(Wire):
    """bfloat16: the upper half of a float32, rounded to nearest."""

    name = "bf16"
    write_passes, read_passes = 1.0, 3.5
    bucket_mb = CODED_BUCKET_MB

    def num_bytes(self, numel: int, itemsize: int) -> int:
        """Return two bytes per number."""
        return 2 * numel

    def codec(self, dtype: torch.dtype, device: torch.device) -> Codec:
        """Return the codec of bfloat16 messages."""
        return _Bf16Codec(dtype, device)


@final
class _Bf16Codec(Codec):
    """Messages are bfloat16 tensors; the first element of a mark is NaN."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._theirs = torch.empty(BLOCK, dtype=self.work, device=device)
        self._ours = torch.empty_like(self._theirs)

    def new_message(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.bfloat16, device=self.device)

    def encode(self, x: Tensor, range: float, message: Tensor) -> float:
        for block, part in zip(x.split(BLOCK), message.split(BLOCK), strict=True):
            part.copy_(block).clamp_(-_LARGEST, _LARGEST)
        return 0.0

    def mark(self, message: Tensor) -> None:
        message.zero_()
        message[:1] = math.nan

    def take(
        self,
        message: Tensor,
        own: Tensor,
        x: Tensor,
        weight: float,
        into: Tensor,
        *,
        first: bool,
        mutual: bool = False,
    ) -> Arrival:
        if bool(message[:1].isnan().any()):
            return Arrival(Fate.MARKED)
        parts = zip(message.split(BLOCK), own.split(BLOCK), into.split(BLOCK), strict=True)
        for theirs, ours, total in parts:
            difference = self._theirs[: len(total)].copy_(theirs)
            difference.sub_(self._ours[: len(total)].copy_(ours)).mul_(weight)
            total.copy_(difference) if first else total.add_(difference)
        return Arrival(Fate.TAKEN)

    def add_own(self, own: Tensor, factor: float, into: Tensor, *, first: bool) -> None:
        for ours, total in zip(own.split(BLOCK), into.split(BLOCK), strict=True):
            part = self._ours[: len(total)].copy_(ours).mul_(factor)
            total.copy_(part) if first else total.add_(part)
