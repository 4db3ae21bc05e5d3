"""Small models of four kinds, with their batches, for benchmarks of simulations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.tasks import Tokens

VOCABULARY, TIME = 64, 16


class Workload(NamedTuple):
    """A model, and the size of a worker's batch."""

    build: Callable[[], nn.Module]
    batch: int
    sample: Callable[[int, int], tuple[Tensor, Tensor]]
    """From workers and batch size: inputs and targets, workers first."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def lstm() -> nn.Module:
    return Tokens(32, nn.LSTM(32, 64, batch_first=True), outputs=64, vocabulary=VOCABULARY)


def transformer() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0, batch_first=True) for _ in range(2)]
    return Tokens(32, nn.Sequential(*layers), vocabulary=VOCABULARY)


def images(workers: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(workers, batch, 64), torch.randint(10, (workers, batch))


def tokens(workers: int, batch: int) -> tuple[Tensor, Tensor]:
    sequences = torch.randint(VOCABULARY, (workers, batch, TIME + 1))
    return sequences[..., :-1], sequences[..., -1]


WORKLOADS = {
    "mlp": Workload(mlp, 32, images),
    "convnet": Workload(convnet, 16, images),
    "lstm": Workload(lstm, 16, tokens),
    "transformer": Workload(transformer, 16, tokens),
}
loss_of = nn.functional.cross_entropy


def make_optimizer(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.01, momentum=0.9, fused=True)
