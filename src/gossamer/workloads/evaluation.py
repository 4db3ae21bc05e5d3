"""Metrics over batches of test data, of one model or of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from gossamer.workloads.workload import Data, Transform, as_they_are

Forward: TypeAlias = Callable[[Tensor], Tensor]
"""A model, or any function from inputs to outputs."""

Batched: TypeAlias = Callable[[Data, torch.dtype], Iterable[tuple[Tensor, Tensor]]]


def _itself(mean: float) -> float:
    return mean


@final
@dataclass(frozen=True, slots=True)
class MeanMetric:
    """A metric that is a mean over test data, or a function of one: ``metric(model, data)``.

    For several models a batch is fetched and transformed once, and they run one after the other.
    vmap over nine of them was slower in every workload tried: batches are so large that the
    overhead of calls, which is all that vmap would save, is small.
    """

    total: Callable[[Tensor, Tensor], Tensor]
    """Of outputs and targets of a batch, the sum of what is averaged over all targets."""

    batches: Batched
    """Inputs and targets of all test samples, some at a time, for models of a dtype."""

    of_mean: Callable[[float], float] = _itself
    """From the mean to the metric."""

    def __call__(self, model: nn.Module, data: Data) -> float:
        """Return the metric of a model that is in evaluation mode."""
        return self.of_each([model], next(model.parameters()).dtype, data)[0]

    def of_each(self, models: Sequence[Forward], dtype: torch.dtype, data: Data) -> list[float]:
        """Return the metrics of several models of a dtype."""
        totals, num = self.sums(models, dtype, data)
        return [self.finish(total, num) for total in totals]

    @torch.no_grad()
    def sums(
        self, models: Sequence[Forward], dtype: torch.dtype, data: Data
    ) -> tuple[list[float], int]:
        """Return each model's sum, and the number of targets: ranks add these over their parts."""
        totals, num = [0.0] * len(models), 0
        for inputs, targets in self.batches(data, dtype):
            for place, model in enumerate(models):
                totals[place] += float(self.total(model(inputs), targets))
            num += targets.numel()
        return totals, num

    def finish(self, total: float, num: int) -> float:
        """Return the metric from a sum over ``num`` targets."""
        return self.of_mean(total / num)


def accuracy(transform: Transform = as_they_are, batch_size: int = 500) -> MeanMetric:
    """Return the metric: the fraction of samples whose class has the largest output."""
    return MeanMetric(_num_right, batched(transform, batch_size))


def token_loss(batch_size: int = 64, of_mean: Callable[[float], float] = _itself) -> MeanMetric:
    """Return the metric: mean cross-entropy per token, in nats, or a function of it."""
    return MeanMetric(_sum_of_losses, batched(as_they_are, batch_size), of_mean)


def batched(transform: Transform, batch_size: int) -> Batched:
    """Return a function that yields all test samples with their targets, as model inputs."""

    def batches(data: Data, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        # No empty batch: the mean over no samples is NaN.
        for start in range(0, len(data.test_targets), batch_size):
            chosen = torch.arange(start, min(start + batch_size, len(data.test_targets)))
            inputs = transform(data.test_inputs[chosen], None)
            inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
            yield inputs, data.test_targets[chosen]

    return batches


@torch.no_grad()
def predictions(
    model: nn.Module, data: Data, transform: Transform, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs and targets of all test samples, for metrics that are not means."""
    dtype = next(model.parameters()).dtype
    for inputs, targets in batched(transform, batch_size)(data, dtype):
        yield model(inputs), targets


def _num_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).sum()


def _sum_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return next_token_loss(outputs, targets).double() * targets.numel()


def _bits(nats: float) -> float:
    return nats / math.log(2)


def _exponential(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, vocabulary] against [batch, time]."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


bits_per_byte = token_loss(of_mean=_bits)
"""The mean cross-entropy of a byte-level model, in bits."""

perplexity = token_loss(of_mean=_exponential)
"""Perplexity: e to the mean cross-entropy per token."""
