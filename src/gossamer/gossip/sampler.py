"""Samples shared out among the members, step by step: who is lost leaves its share to the others.

Step t is for the samples at t·B to (t+1)·B of one endless sequence, a new permutation of all
samples after the other, with B samples per step of all workers together. The k-th of n members
takes every n-th of them, from the k-th on. So nothing has to be saved or told but the step, and
when members change, the next step is shared among those who are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, final

import torch
from torch import Tensor

from gossamer.errors import UserError
from gossamer.seeds import pass_seed


class Members(Protocol):
    """Who takes part now; a ``Gossip`` is one."""

    @property
    def rank(self) -> int:
        """The index of this worker among the members."""
        ...

    @property
    def num_workers(self) -> int:
        """How many members there are."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps taken so far."""
        ...


@final
class MemberSampler:
    """A batch sampler for ``DataLoader(batch_sampler=...)``: this worker's samples of every step.

    It has no end; the loop has. Every sample comes once before any comes again, over all workers,
    as long as nobody is lost. A death costs the share of the one that is lost in the step that all
    are in. Where workers are not in the same one, samples of the steps between the last and the
    first of them may be missed or come twice, and of those that a loader has read ahead; samples of
    all other steps come once. With fewer members batches are larger, and as many samples per step.
    Batches are counted from ``gossip.num_steps`` on. Where a loop takes several per step, to
    accumulate gradients, or a GradScaler skips steps, a worker that joins is elsewhere: ask for
    ``batch(...)`` there, by a count that all workers agree on.

    Args:
        gossip: who takes part.
        num_samples: in the data set.
        batch_size: samples per step of all workers together.
        seed: of the permutations; the same on all workers.
    """

    def __init__(
        self, gossip: Members, num_samples: int, batch_size: int, *, seed: int = 0
    ) -> None:
        if num_samples < 1 or batch_size < gossip.num_workers:
            raise UserError(
                "a sampler needs a sample, and one per step for each worker, got "
                f"{num_samples} samples and batch_size={batch_size} for {gossip.num_workers} "
                "workers; batch_size is that of all of them together"
            )
        self._gossip = gossip
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._seed = seed
        self._permutation: tuple[int, Tensor] = (-1, torch.empty(0))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this step and all after it."""
        step = self._gossip.num_steps
        while True:
            yield self.batch(step)
            step += 1

    def batch(self, step: int) -> list[int]:
        """Return the indices of this worker's samples in a step, with the members of now."""
        first, last = step * self._batch_size, (step + 1) * self._batch_size
        places = range(first + self._gossip.rank, last, self._gossip.num_workers)
        return [self._sample(place) for place in places]

    def _sample(self, place: int) -> int:
        """Return what is at a place of the endless sequence."""
        epoch, within = divmod(place, self._num_samples)
        if self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(pass_seed(self._seed, epoch))
            self._permutation = epoch, torch.randperm(self._num_samples, generator=generator)
        return int(self._permutation[1][within])
