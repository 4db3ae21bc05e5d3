"""A worker's replica of the model, as it is mixed and averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from gossamer.algorithms import PARAMETERS, Algorithm
from gossamer.gossip.buckets import flatten_, unflatten_
from gossamer.normalization import StatisticsRule, running_statistics


@final
class Replica:
    """Holds the parameters of one worker in buckets, until it is released.

    Args:
        model: whose running statistics are mixed or averaged.
        trained: its parameters that are mixed; they become views of buckets.
        rule: what happens to running statistics.
        bucket_mb: size of a bucket in megabytes.
        algorithm: what it keeps besides parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[Tensor],
        rule: StatisticsRule,
        bucket_mb: float,
        algorithm: Algorithm,
    ) -> None:
        statistics = [*running_statistics(model).values()]
        self.device = trained[0].device
        self.buckets = flatten_(trained, bucket_mb)
        self.changing = flatten_(statistics, bucket_mb) if rule.mixed else []
        """Buckets of statistics, which a forward pass changes while they are sent."""
        self._flattened = [*trained, *(statistics if rule.mixed else ())]
        self._averaged: Sequence[Tensor] = statistics if rule.averaged else []
        # - What the algorithm keeps
        kept = (*algorithm.tracked, *algorithm.kept)
        self.states = {name: [torch.zeros_like(p) for p in trained] for name in kept}
        self.weighted = algorithm.weighted
        self.weight = torch.ones(1, dtype=torch.float64, device=self.device)
        """How much of the sum of all workers' parameters this worker has, where it is weighted."""
        self.exchanged = {
            PARAMETERS: [*self.buckets, *([self.weight] if self.weighted else [])],
            **{name: flatten_(self.states[name], bucket_mb) for name in algorithm.tracked},
        }
        """Buckets by state."""

    @property
    def is_released(self) -> bool:
        """Whether its tensors are the model's own again."""
        return not self.buckets

    @property
    def averaged(self) -> list[Tensor]:
        """What is averaged over workers: parameters, and where it is the rule, statistics."""
        return [*self.buckets, *self._averaged]

    @torch.no_grad()
    def averages(self, average: Callable[[Tensor], Tensor]) -> Generator[tuple[Tensor, Tensor]]:
        """Yield each tensor that is averaged with its mean over all workers.

        Args:
            average: a collective that returns the mean of a tensor.
        """
        weight, mean = self.weight, average(self.weight) if self.weighted else self.weight
        for bucket in self.buckets:
            if not self.weighted:
                yield bucket, average(bucket)
            else:
                yield bucket, average(bucket * weight.to(bucket.dtype)).div_(mean.to(bucket.dtype))
        if self._averaged:
            # Many and small: one message for all of them.
            means = average(torch.cat([buffer.flatten() for buffer in self._averaged]))
            sizes = [buffer.numel() for buffer in self._averaged]
            for buffer, mean in zip(self._averaged, means.split(sizes), strict=True):
                yield buffer, mean.view_as(buffer)

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Put back, bit for bit, what the code of a block changes."""
        saved = [tensor.detach().clone() for tensor in self.averaged]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(self.averaged, saved, strict=True):
                    tensor.copy_(before)

    def release(self) -> None:
        """Give tensors storage of their own again."""
        flattened, self._flattened = self._flattened, []
        self.buckets, self.changing, self._averaged = [], [], []
        self.states, self.exchanged = {}, {}
        unflatten_(flattened)
