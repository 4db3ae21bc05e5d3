"""Which samples a worker sees: a function of seed, worker and epoch alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from gossamer.errors import UserError

_SHUFFLE, _DRAW = 0, 1
"""Streams of random numbers that must not be the same."""


def parse_sharding(text: str) -> str:
    """Check how samples are dealt to workers."""
    if text != "iid":
        raise UserError(f"sharding must be iid, got {text!r}")
    return text


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How samples are dealt to workers.

    Args:
        num_samples: how many there are.
        num_workers: how many share them.
        batch_size: samples per worker and step.
        steps_per_epoch: batches per worker and epoch.
        seed: of all shuffling.
    """

    num_samples: int
    num_workers: int
    batch_size: int
    steps_per_epoch: int
    seed: int


def draw_batches(draw: Draw, worker: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the samples of one worker's batches in an epoch, [steps, batch].

    All samples are shuffled for every epoch and dealt out, as in the papers (iid): no sample comes
    twice in an epoch, on any worker, as far as shards suffice. A worker that has seen its shard
    starts it again. Where a shard is smaller than a batch, the batch would hold the same few
    samples again and again; then samples are drawn from all, with replacement.
    """
    if not 0 <= worker < draw.num_workers:
        raise UserError(
            f"a worker must be one of 0 to {draw.num_workers - 1}, got {worker}; "
            "draw for as many workers as take part"
        )
    shape = draw.steps_per_epoch, draw.batch_size
    shuffled = np.random.default_rng((draw.seed, _SHUFFLE, epoch)).permutation(draw.num_samples)
    shard = shuffled[worker :: draw.num_workers]
    if len(shard) < draw.batch_size:
        generator = np.random.default_rng((draw.seed, _DRAW, epoch, worker))
        return generator.integers(draw.num_samples, size=shape)
    return np.resize(shard, shape)
