"""Metrics on test data that are too many for one forward pass, of one model or of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from gossamer.workloads.workload import Data, Transform, as_they_are

Forward: TypeAlias = Callable[[Tensor], Tensor]
"""A model, or what stands for one: from inputs to outputs."""

Batched: TypeAlias = Callable[[Data, torch.dtype], Iterable[tuple[Tensor, Tensor]]]


def _itself(mean: float) -> float:
    return mean


@final
@dataclass(frozen=True, slots=True)
class MeanMetric:
    """A metric that is a mean over test data, or a function of one: ``metric(model, data)``.

    Of several models a batch is fetched and prepared once, and given to one after the other. Under
    vmap nine of them took longer in every workload tried: batches are so large that calls cost
    little, and there is nothing else to save.
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
        """Return each model's total, and over how many targets: what parts of the data add to."""
        totals, num = [0.0] * len(models), 0
        for inputs, targets in self.batches(data, dtype):
            for place, model in enumerate(models):
                totals[place] += float(self.total(model(inputs), targets))
            num += targets.numel()
        return totals, num

    def finish(self, total: float, num: int) -> float:
        """Return the metric whose sum over so many targets is known."""
        return self.of_mean(total / num)


def accuracy(transform: Transform = as_they_are, batch_size: int = 500) -> MeanMetric:
    """Return the metric: the share of samples whose class has the largest output."""
    return MeanMetric(_num_right, batched(transform, batch_size))


def token_loss(batch_size: int = 64, of_mean: Callable[[float], float] = _itself) -> MeanMetric:
    """Return the metric: mean cross-entropy per token, in nats, or a function of it."""
    return MeanMetric(_sum_of_losses, batched(as_they_are, batch_size), of_mean)


def batched(transform: Transform, batch_size: int) -> Batched:
    """Return what yields all test samples with their targets, as a model takes them."""

    def batches(data: Data, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        # No batch where there is no sample: the mean of none is no number.
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
    """Yield the outputs for all test samples with their targets: for metrics that are no means."""
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
"""The mean cross-entropy of a model of bytes, in bits."""

perplexity = token_loss(of_mean=_exponential)
"""e to the mean cross-entropy per token."""
