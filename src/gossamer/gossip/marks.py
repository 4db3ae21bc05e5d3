"""What a rank sends in place of parameters that are not finite.

Zeros, and NaN at the place of its rank: as large as the bucket that it stands for, so that messages
and all-reduces are the same ones; and also the sum of an all-reduce tells whose marks are in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def mark_like(bucket: Tensor, rank: int) -> Tensor:
    """Return what a rank sends in place of a bucket."""
    mark = torch.zeros_like(bucket)
    if len(mark):
        mark[rank % len(mark)] = math.nan
    return mark


def marked(received: Tensor, ranks: Sequence[int]) -> list[int]:
    """Return those of the ranks whose marks are in what was received from them.

    Where a bucket is shorter than there are ranks, some share a place, and all of them are named.
    """
    if not len(received):
        return []
    places = torch.tensor([rank % len(received) for rank in ranks], device=received.device)
    sound = torch.isfinite(received[places]).tolist()
    return [rank for rank, is_sound in zip(ranks, sound, strict=True) if not is_sound]
