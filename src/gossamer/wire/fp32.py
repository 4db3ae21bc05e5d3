"""Buckets unchanged, in the parameters' own precision: nothing is rounded."""

from __future__ import annotations

from typing import final

import torch

from gossamer.wire.wire import Wire


@final
class Fp32(Wire):
    """Full precision; four bytes per number if parameters are float32."""

    name = "fp32"

    def num_bytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes of the bucket in memory."""
        return numel * itemsize

    def codec(self, dtype: torch.dtype, device: torch.device) -> None:
        """Return None: a message is the bucket itself."""
        return
