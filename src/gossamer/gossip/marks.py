"""Marks: what a rank sends in place of a bucket that is not finite.

A mark has zeros, and NaN at the index of its rank. It has the size of the bucket, so messages and
all-reduces do not change; and the sum of an all-reduce shows which ranks sent marks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def mark_like(bucket: Tensor, rank: int) -> Tensor:
    """Return the mark of a rank in place of a bucket."""
    mark = torch.zeros_like(bucket)
    if len(mark):
        mark[rank % len(mark)] = math.nan
    return mark


def marked(received: Tensor, ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose marks are in a message or sum of messages from them.

    If a bucket has fewer elements than there are ranks, some share an index: all of them are
    returned.
    """
    if not len(received):
        return []
    places = torch.tensor([rank % len(received) for rank in ranks], device=received.device)
    sound = torch.isfinite(received[places]).tolist()
    return [rank for rank, is_sound in zip(ranks, sound, strict=True) if not is_sound]
