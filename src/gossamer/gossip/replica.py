"""A worker's replica of the model in buckets, for mixing and averaging."""

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

    Parameters become views of buckets, which are exchanged. There are two exceptions:

    - Shards stay in FSDP2's storage, and buckets are copies of them: ``collect`` copies shards into
      buckets before an exchange, ``spread`` copies the mixed buckets back.
    - If several ranks hold the same replica, each exchanges its slice of every bucket, and
      ``spread`` all-gathers the mixed slices. So their replicas stay equal bit for bit.

    Args:
        model: the model; its running statistics may be mixed or averaged.
        trained: its parameters that are mixed.
        rule: what happens to running statistics.
        bucket_mb: size of a bucket in megabytes.
        algorithm: declares the states to allocate.
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
        # Shards are different parameters on each rank of a node, slices parts of the same.
        self._is_sliced = self._within.size > 1 and not self._sharded
        slices = self._within.size if self._is_sliced else 1
        self._in_bucket = bucket_indices(self._copies, bucket_mb)
        self.buckets = flatten_(self._copies or trained, bucket_mb, slices)
        self.changing = flatten_(statistics, bucket_mb) if rule.mixed else []
        """Buckets of statistics, which a forward pass changes while they are in flight."""
        self._flattened = [
            *(trained if not self._sharded else ()),
            *(statistics if rule.mixed else ()),
        ]
        self._averaged: Sequence[Tensor] = statistics if rule.averaged else []
        # - States of the algorithm
        kept = (*algorithm.tracked, *algorithm.kept)
        self.states = {name: [torch.zeros_like(p) for p in locals_of(trained)] for name in kept}
        self.weighted = algorithm.weighted
        self.weight = torch.ones(1, dtype=torch.float64, device=self.device)
        """The worker's weight under push-sum, otherwise 1."""
        self.exact = [self.weight] if self.weighted else []
        """Buckets that are exchanged along with the parameters in full precision."""
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
        """Whether parameters have been moved out of the buckets."""
        return not self.buckets

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds shards of the parameters, and other ranks the rest."""
        return bool(self._sharded)

    @property
    def averaged(self) -> list[Tensor]:
        """The tensors that are averaged over workers: parameters, and statistics if so chosen."""
        parameters = locals_of(self._trained) if self._sharded else self.buckets
        return [*parameters, *self._averaged]

    @torch.no_grad()
    def collect(self, state: str = PARAMETERS, buckets: Sequence[int] | None = None) -> None:
        """Copy shards into their buckets, before these are exchanged or averaged.

        Args:
            state: the name of the state.
            buckets: indices of the buckets; by default all.
        """
        if self._sharded and state == PARAMETERS:
            for copy, shard in self._copied(buckets):
                copy.copy_(shard)

    @torch.no_grad()
    def spread(self, state: str = PARAMETERS, buckets: Sequence[int] | None = None) -> None:
        """Copy mixed buckets to shards, or all-gather mixed slices; arguments as of collect."""
        if self._is_sliced:
            held = self._held[state]
            self._within.all_gather_(held if buckets is None else [held[b] for b in buckets])
        elif self._sharded and state == PARAMETERS:
            for copy, shard in self._copied(buckets):
                shard.copy_(copy)

    def _copied(self, buckets: Sequence[int] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the copies in some buckets, each with the shard that it is a copy of."""
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
            # Many small tensors: one all-reduce for all of them.
            means = average(torch.cat([buffer.flatten() for buffer in self._averaged]))
            means = self._within.mean(means, "running statistics")
            sizes = [buffer.numel() for buffer in self._averaged]
            for buffer, mean in zip(self._averaged, means.split(sizes), strict=True):
                yield buffer, mean.view_as(buffer)

    def _targets_of(self, bucket: Tensor, mean: Tensor) -> Generator[tuple[Tensor, Tensor]]:
        """Yield the tensors to copy a mean to: the bucket, or the shards that it is a copy of."""
        if not self._sharded:
            yield bucket, self._within.whole_of(mean) if self._is_sliced else mean
            return
        for shard, copy in zip(locals_of(self._trained), self._copies, strict=True):
            if copy.untyped_storage().data_ptr() == bucket.data_ptr():
                yield shard, mean.as_strided(copy.shape, copy.stride(), copy.storage_offset())

    @contextlib.contextmanager
    def restored(self) -> Generator[Callable[[], None]]:
        """Restore ``averaged`` bit for bit after the block, or earlier by the yielded function."""
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
            # A call in the block may have collected changed shards into the copies: a drained
            # exchange that is mixed later must find the parameters that it sent.
            self.collect()

    def release(self) -> None:
        """Move tensors out of the buckets, into storage of their own."""
        flattened, self._flattened = self._flattened, []
        self.buckets, self.changing, self._averaged = [], [], []
        self._trained, self._copies, self._sharded = [], [], []
        self.states, self.exchanged, self._held, self.exact = {}, {}, {}, []
        unflatten_(flattened)
