"""Buckets as they are, in the precision that parameters have: nothing is rounded."""

from __future__ import annotations

from typing import final

import torch

from gossamer.wire.wire import Wire


@final
class Fp32(Wire):
    """Every number in full; four bytes each where parameters are float32."""

    name = "fp32"

    def num_bytes(self, numel: int, itemsize: int) -> int:
        """As many as in memory."""
        return numel * itemsize

    def codec(self, dtype: torch.dtype, device: torch.device) -> None:
        """Return nothing: a message is the bucket itself."""
        return
