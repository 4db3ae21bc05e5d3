"""Metrics of a model on test data that are too many for one forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gossamer.workloads.workload import Data, Transform, as_they_are

Evaluate: TypeAlias = Callable[[nn.Module, Data], float]


def accuracy(transform: Transform = as_they_are, batch_size: int = 500) -> Evaluate:
    """Return the metric: the share of samples whose class has the largest output."""

    def evaluate(model: nn.Module, data: Data) -> float:
        right = sum(
            int((outputs.argmax(1) == targets).sum())
            for outputs, targets in predictions(model, data, transform, batch_size)
        )
        return right / len(data.test_targets)

    return evaluate


def token_loss(batch_size: int = 64) -> Evaluate:
    """Return the metric: mean cross-entropy per token, in nats."""

    def evaluate(model: nn.Module, data: Data) -> float:
        total, num_tokens = 0.0, 0
        for outputs, targets in predictions(model, data, as_they_are, batch_size):
            total += float(next_token_loss(outputs, targets)) * targets.numel()
            num_tokens += targets.numel()
        return total / num_tokens

    return evaluate


def bits_per_byte(model: nn.Module, data: Data) -> float:
    """Return the mean cross-entropy of a model of bytes, in bits."""
    return token_loss()(model, data) / math.log(2)


def perplexity(model: nn.Module, data: Data) -> float:
    """Return e to the mean cross-entropy per token."""
    loss = token_loss()(model, data)
    return math.exp(loss) if loss < 700 else math.inf


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, vocabulary] against [batch, time]."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@torch.no_grad()
def predictions(
    model: nn.Module, data: Data, transform: Transform, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the outputs for all test samples with their targets, some at a time."""
    dtype = next(model.parameters()).dtype
    for chosen in torch.arange(len(data.test_targets)).split(batch_size):
        inputs = transform(data.test_inputs[chosen], None)
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        yield model(inputs), data.test_targets[chosen]
