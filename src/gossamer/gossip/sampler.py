"""A sampler that divides the samples of every step among the current members.

The samples form one endless sequence: one permutation of the data set after another. Step t uses
the samples at positions t·B to (t+1)·B, where B is the batch size of all workers together, and the
k-th of n members takes every n-th of them, beginning with the k-th. The step is therefore the only
state: when members change, they divide the next step's samples without any message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, final

import torch
from torch import Tensor

from gossamer.errors import UserError
from gossamer.seeds import pass_seed


class Members(Protocol):
    """The current members, such as a ``Gossip`` gives them."""

    @property
    def rank(self) -> int:
        """The index of this worker among the members."""
        ...

    @property
    def num_workers(self) -> int:
        """The number of members."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps taken so far."""
        ...


@final
class MemberSampler:
    """A batch sampler for ``DataLoader(batch_sampler=...)``: this worker's samples of every step.

    It never ends; the training loop does. While no worker is lost, every sample is drawn once per
    pass over the data set, by one of the workers. A lost worker's samples of the step that all are
    in are missed. If workers are in different steps, samples of the steps from the slowest to the
    fastest worker, and of batches that a loader has prefetched, may be missed or drawn twice; those
    of all other steps are drawn once. With fewer members each draws a larger batch, and a step
    still uses ``batch_size`` samples.

    The iterator counts batches from ``gossip.num_steps``. If the loop draws several batches per
    step, to accumulate gradients, or a GradScaler skips steps, a worker that joins would begin at
    another batch than the others: call ``batch(count)`` then, with a count that all workers share.

    Args:
        gossip: gives the current members.
        num_samples: size of the data set.
        batch_size: samples per step of all workers together.
        seed: of the permutations; the same on all workers.
    """

    def __init__(
        self, gossip: Members, num_samples: int, batch_size: int, *, seed: int = 0
    ) -> None:
        if num_samples < 1 or batch_size < gossip.num_workers:
            raise UserError(
                "a sampler needs one sample or more, and one per worker in each step, got "
                f"{num_samples} samples and batch_size={batch_size} for {gossip.num_workers} "
                "workers; batch_size counts the samples of all workers together"
            )
        self._gossip = gossip
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._seed = seed
        self._permutation: tuple[int, Tensor] = (-1, torch.empty(0))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the current step and of all steps after it."""
        step = self._gossip.num_steps
        while True:
            yield self.batch(step)
            step += 1

    def batch(self, step: int) -> list[int]:
        """Return the indices of this worker's samples in a step, given the current members."""
        first, last = step * self._batch_size, (step + 1) * self._batch_size
        positions = range(first + self._gossip.rank, last, self._gossip.num_workers)
        return [self._sample(position) for position in positions]

    def _sample(self, position: int) -> int:
        """Return the sample at a position of the endless sequence."""
        epoch, within = divmod(position, self._num_samples)
        if self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(pass_seed(self._seed, epoch))
            self._permutation = epoch, torch.randperm(self._num_samples, generator=generator)
        return int(self._permutation[1][within])
