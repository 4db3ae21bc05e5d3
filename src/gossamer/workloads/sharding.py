"""Which samples a worker gets: a function of only seed, worker and epoch.

So a rank draws its batches without communication, and equals the virtual worker of a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from gossamer.errors import UserError
from gossamer.registry import Registry

IntArray: TypeAlias = npt.NDArray[np.int64]

_SHUFFLE, _DRAW, _DEAL, _WITHIN = 0, 1, 3, 4
"""Distinct random streams; the engine's augmentation uses 2, which must not be reused."""

_BALANCING_ROUNDS = 200


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How samples are distributed to workers.

    Args:
        num_samples: how many there are.
        num_workers: how many share them.
        batch_size: samples per worker and step.
        steps_per_epoch: batches per worker and epoch.
        seed: of all shuffling.
        sharding: as ``parse_sharding`` takes it.
        labels: the class of each sample, where there are classes.
    """

    num_samples: int
    num_workers: int
    batch_size: int
    steps_per_epoch: int
    seed: int
    sharding: str = "iid"
    labels: IntArray | None = field(default=None, compare=False)


Sharding: TypeAlias = Callable[[Draw, Sequence[int], int], list[IntArray]]
"""From a draw, workers and an epoch to the samples of each of these workers, in order."""


def draw_batches(draw: Draw, workers: Sequence[int], epoch: int) -> IntArray:
    """Return the samples of some workers' batches in an epoch, [workers, steps, batch].

    No sample is used twice in an epoch, on any worker, as far as shards suffice; their sizes differ
    by one at most. A worker that has used up its shard starts over.
    """
    for worker in workers:
        if not 0 <= worker < draw.num_workers:
            raise UserError(
                f"a worker must be one of 0 to {draw.num_workers - 1}, got {worker}; "
                "draw for as many workers as take part"
            )
    shape = draw.steps_per_epoch, draw.batch_size
    shards = parse_sharding(draw.sharding)(draw, workers, epoch)
    return np.stack([np.resize(shard, shape) for shard in shards])


def parse_sharding(text: str) -> Sharding:
    """Return how samples are distributed to workers.

    Args:
        text: a name of ``SHARDINGS`` or a plug-in, with arguments where it takes any.
    """
    return SHARDING_REGISTRY.parse(text).make()


def iid() -> Sharding:
    """The papers' setting: all samples are shuffled and redistributed in every epoch."""
    return _iid


def fixed() -> Sharding:
    """Samples are distributed once, and each worker shuffles its own in every epoch."""
    return _fixed


def dirichlet(alpha: float) -> Sharding:
    """As fixed, with different class proportions on every worker (label skew).

    Args:
        alpha: the smaller, the more skewed.
    """
    if not 0 < alpha < np.inf:
        raise UserError(
            f"dirichlet needs a finite alpha > 0, got {alpha}; for instance dirichlet(alpha=0.5)"
        )
    return partial(_dirichlet, alpha=alpha)


# A new sharding is one function and one row here.
SHARDINGS: dict[str, Callable[..., Sharding]] = {
    "iid": iid,
    "fixed": fixed,
    "dirichlet": dirichlet,
}

SHARDING_REGISTRY: Registry[Sharding] = Registry(
    kind="sharding",
    table=SHARDINGS,
    group="gossamer.shardings",
    example="iid or dirichlet(alpha=0.5)",
    makes=(Callable,),
    example_of={"dirichlet": "dirichlet(alpha=0.5)"}.get,
)


def _iid(draw: Draw, workers: Sequence[int], epoch: int) -> list[IntArray]:
    """Shuffle and distribute all samples.

    Where a shard is smaller than a batch, the batch would repeat the same few samples; then samples
    are drawn from all, with replacement.
    """
    shuffled = _generator(draw, _SHUFFLE, epoch).permutation(draw.num_samples)
    shape = draw.steps_per_epoch, draw.batch_size
    shards: list[IntArray] = []
    for worker in workers:
        shard = shuffled[worker :: draw.num_workers]
        if len(shard) < draw.batch_size:
            shard = _generator(draw, _DRAW, epoch, worker).integers(draw.num_samples, size=shape)
        shards.append(shard)
    return shards


def _fixed(draw: Draw, workers: Sequence[int], epoch: int) -> list[IntArray]:
    _check_sizes(draw)
    dealt = _generator(draw, _DEAL).permutation(draw.num_samples)
    shards = [dealt[worker :: draw.num_workers] for worker in workers]
    return _shuffle_within(draw, shards, workers, epoch)


def _dirichlet(draw: Draw, workers: Sequence[int], epoch: int, alpha: float) -> list[IntArray]:
    """Build shards of equal size with class proportions from Dirichlet(alpha, ..., alpha).

    Every worker draws proportions; they are balanced so that all classes are used up and all
    shards are full. Samples left over by rounding are distributed without regard to class.
    """
    _check_sizes(draw)
    if draw.labels is None:
        raise UserError(
            "dirichlet shards need samples with classes, and these have none; "
            "use sharding iid or fixed"
        )
    generator = _generator(draw, _DEAL)
    _, classes, class_sizes = np.unique(draw.labels, return_inverse=True, return_counts=True)
    sizes = np.full(draw.num_workers, draw.num_samples // draw.num_workers)
    sizes[generator.permutation(draw.num_workers)[: draw.num_samples % draw.num_workers]] += 1
    proportions = generator.dirichlet(np.full(len(class_sizes), alpha), draw.num_workers)
    counts = np.floor(_balance(proportions, sizes, class_sizes)).astype(np.int64)

    shuffled = generator.permutation(draw.num_samples)
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    owner = np.full(draw.num_samples, -1)
    for first, counts_of_class in zip(np.cumsum(class_sizes) - class_sizes, counts.T, strict=True):
        dealt = np.repeat(np.arange(draw.num_workers), counts_of_class)
        owner[first : first + len(dealt)] = dealt
    lacking = np.repeat(np.arange(draw.num_workers), sizes - counts.sum(1))
    owner[owner < 0] = generator.permutation(lacking)

    by_owner = by_class[np.argsort(owner, kind="stable")]
    ends = np.cumsum(sizes)
    shards = [by_owner[ends[worker] - sizes[worker] : ends[worker]] for worker in workers]
    return _shuffle_within(draw, shards, workers, epoch)


def _balance(
    proportions: npt.NDArray[np.float64], rows: IntArray, columns: IntArray
) -> npt.NDArray[np.float64]:
    """Scale rows and columns in turn towards these sums (Sinkhorn); none ends above its sum."""
    matrix = proportions + 1e-9  # so that every class has a worker that takes it
    for _ in range(_BALANCING_ROUNDS):
        matrix *= (columns / matrix.sum(0))[None, :]
        matrix *= (rows / matrix.sum(1))[:, None]
    return matrix * np.minimum(1, columns / matrix.sum(0))[None, :]


def _shuffle_within(
    draw: Draw, shards: list[IntArray], workers: Sequence[int], epoch: int
) -> list[IntArray]:
    return [
        _generator(draw, _WITHIN, epoch, worker).permutation(shard)
        for shard, worker in zip(shards, workers, strict=True)
    ]


def _check_sizes(draw: Draw) -> None:
    if draw.num_samples < draw.num_workers:
        raise UserError(
            f"fixed shards need at least one sample per worker, got {draw.num_samples} samples "
            f"for {draw.num_workers} workers; use sharding iid or fewer workers"
        )


def _generator(draw: Draw, stream: int, *numbers: int) -> np.random.Generator:
    return np.random.default_rng((draw.seed, stream, *numbers))
