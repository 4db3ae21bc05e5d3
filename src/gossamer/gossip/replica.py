"""A worker's replica of the model, as it is mixed and averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from gossamer.algorithms import PARAMETERS, Algorithm
from gossamer.gossip.buckets import flatten_, unflatten_
from gossamer.gossip.shards import is_sharded, locals_of, reshard, sharded_modules
from gossamer.gossip.within import Within
from gossamer.normalization import StatisticsRule, running_statistics
from gossamer.wire import bucket_indices


@final
class Replica:
    """Holds the parameters of one worker in buckets, until it is released.

    Parameters become views of buckets, which are exchanged. Two things may be otherwise:

    - Shards stay where FSDP2 has them, and buckets are copies of them: ``collect`` copies in before
      an exchange, ``spread`` copies out what it was mixed to.
    - Where several ranks hold the same replica, each exchanges its slice of every bucket, and
      ``spread`` gathers the slices that the others have mixed. So all of them keep the same bits.

    Args:
        model: whose running statistics are mixed or averaged.
        trained: its parameters that are mixed.
        rule: what happens to running statistics.
        bucket_mb: size of a bucket in megabytes.
        algorithm: what it keeps besides parameters.
        within: the ranks that hold other shards of the parameters, or the same parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[Tensor],
        rule: StatisticsRule,
        bucket_mb: float,
        algorithm: Algorithm,
        within: Within | None = None,
    ) -> None:
        statistics = [*running_statistics(model).values()]
        self.device = trained[0].device
        self._within = within or Within()
        self._trained = trained
        self._sharded = sharded_modules(model) if any(map(is_sharded, trained)) else []
        self._copies = [shard.clone() for shard in locals_of(trained) if self._sharded]
        self._is_sliced = self._within.size > 1 and not self._sharded
        slices = self._within.size if self._is_sliced else 1
        self._in_bucket = bucket_indices(self._copies, bucket_mb)
        self.buckets = flatten_(self._copies or trained, bucket_mb, slices)
        self.changing = flatten_(statistics, bucket_mb) if rule.mixed else []
        """Buckets of statistics, which a forward pass changes while they are sent."""
        self._flattened = [
            *(trained if not self._sharded else ()),
            *(statistics if rule.mixed else ()),
        ]
        self._averaged: Sequence[Tensor] = statistics if rule.averaged else []
        # - What the algorithm keeps
        kept = (*algorithm.tracked, *algorithm.kept)
        self.states = {name: [torch.zeros_like(p) for p in locals_of(trained)] for name in kept}
        self.weighted = algorithm.weighted
        self.weight = torch.ones(1, dtype=torch.float64, device=self.device)
        """How much of the sum of all workers' parameters this worker has, where it is weighted."""
        self.exact = [self.weight] if self.weighted else []
        """Exchanged with the parameters, in full."""
        self._held = {
            PARAMETERS: self.buckets,
            **{name: flatten_(self.states[name], bucket_mb, slices) for name in algorithm.tracked},
        }
        self.exchanged = {
            state: [*map(self._within.slice_of, buckets)] if self._is_sliced else [*buckets]
            for state, buckets in self._held.items()
        }
        """What is exchanged, by state: buckets, or slices of them."""

    @property
    def is_released(self) -> bool:
        """Whether its tensors are the model's own again."""
        return not self.buckets

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds shards of the parameters, and other ranks the rest."""
        return bool(self._sharded)

    @property
    def averaged(self) -> list[Tensor]:
        """What is averaged over workers: parameters, and where it is the rule, statistics."""
        parameters = locals_of(self._trained) if self._sharded else self.buckets
        return [*parameters, *self._averaged]

    @torch.no_grad()
    def collect(self, state: str = PARAMETERS, buckets: Sequence[int] | None = None) -> None:
        """Let buckets hold what this rank has of a state, before it is exchanged or averaged.

        Args:
            state: which.
            buckets: which of them, by index; by default all.
        """
        if self._sharded and state == PARAMETERS:
            for copy, shard in self._copied(buckets):
                copy.copy_(shard)

    @torch.no_grad()
    def spread(self, state: str = PARAMETERS, buckets: Sequence[int] | None = None) -> None:
        """Let the parameters be what their buckets have been mixed to; arguments as of collect."""
        if self._is_sliced:
            held = self._held[state]
            self._within.all_gather_(held if buckets is None else [held[b] for b in buckets])
        elif self._sharded and state == PARAMETERS:
            for copy, shard in self._copied(buckets):
                shard.copy_(copy)

    def _copied(self, buckets: Sequence[int] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the copies in some buckets, each with its shard."""
        shards = locals_of(self._trained)
        for bucket in range(len(self._in_bucket)) if buckets is None else buckets:
            for index in self._in_bucket[bucket]:
                yield self._copies[index], shards[index]

    @torch.no_grad()
    def averages(self, average: Callable[[Tensor], Tensor]) -> Generator[tuple[Tensor, Tensor]]:
        """Yield each tensor that is averaged with its mean over all workers.

        Args:
            average: a collective that returns the mean of a tensor.
        """
        reshard(self._sharded)
        self.collect()
        weight, mean = self.weight, average(self.weight) if self.weighted else self.weight
        for bucket, sent in zip(self.buckets, self.exchanged[PARAMETERS], strict=True):
            if not self.weighted:
                yield from self._targets_of(bucket, average(sent))
            else:
                weighted = average(sent * weight.to(sent.dtype))
                yield from self._targets_of(bucket, weighted.div_(mean.to(sent.dtype)))
        if self._averaged:
            # Many and small: one message for all of them.
            means = average(torch.cat([buffer.flatten() for buffer in self._averaged]))
            means = self._within.mean(means, "running statistics")
            sizes = [buffer.numel() for buffer in self._averaged]
            for buffer, mean in zip(self._averaged, means.split(sizes), strict=True):
                yield buffer, mean.view_as(buffer)

    def _targets_of(self, bucket: Tensor, mean: Tensor) -> Generator[tuple[Tensor, Tensor]]:
        """Yield what is to become a mean: the bucket, or the shards that it is a copy of."""
        if not self._sharded:
            yield bucket, self._within.whole_of(mean) if self._is_sliced else mean
            return
        for shard, copy in zip(locals_of(self._trained), self._copies, strict=True):
            if copy.untyped_storage().data_ptr() == bucket.data_ptr():
                yield shard, mean.as_strided(copy.shape, copy.stride(), copy.storage_offset())

    @contextlib.contextmanager
    def restored(self) -> Generator[Callable[[], None]]:
        """Put back, bit for bit, what the code of a block changes; the function does so at once."""
        reshard(self._sharded)
        saved = [tensor.detach().clone() for tensor in self.averaged]

        @torch.no_grad()
        def put_back() -> None:
            reshard(self._sharded)
            for tensor, before in zip(self.averaged, saved, strict=True):
                tensor.copy_(before)

        try:
            yield put_back
        finally:
            put_back()
            # An average in the block has left something else in the copies, which may yet be mixed.
            self.collect()

    def release(self) -> None:
        """Give tensors storage of their own again."""
        flattened, self._flattened = self._flattened, []
        self.buckets, self.changing, self._averaged = [], [], []
        self._trained, self._copies, self._sharded = [], [], []
        self.states, self.exchanged, self._held, self.exact = {}, {}, {}, []
        unflatten_(flattened)
