"""Small models of every kind that a simulation must handle, with data, in double precision.

``train`` runs them in the plainest way: a module and an optimizer per worker, and a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer.topology import Schedule
from tests.reference import MakeOptimizer, fill_, train_models

VOCABULARY, TIME, BATCH = 7, 3, 3


class Task(NamedTuple):
    """A model and what it is trained on."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    """From worker and step, and nothing else."""

    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy

    def make(self) -> nn.Module:
        """Return the model, the same everywhere."""
        model = self.build().double()
        fill_(model)
        return model

    def loss_of(self, model: nn.Module, worker: int, step: int) -> Tensor:
        """Return the loss of a worker's model on its batch of a step."""
        inputs, targets = self.batch(worker, step)
        return self.loss(model(inputs), targets)


class Tokens(nn.Module):
    """An embedding, something that maps sequences to sequences, and a linear layer."""

    def __init__(
        self,
        width: int,
        body: nn.Module,
        *,
        outputs: int | None = None,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = body
        self.head = nn.Linear(outputs or width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the token after the last."""
        states = self.body(self.embedding(tokens))
        states = states[0] if isinstance(states, tuple) else states
        return self.head(states[:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, VOCABULARY))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 3)),
        nn.Conv2d(1, 3, 2, bias=False),  # whose gradient would be rounding errors, before BatchNorm
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3, VOCABULARY),
    )


def lstm() -> nn.Module:
    return Tokens(4, nn.LSTM(4, 4, batch_first=True))


def transformer(dropout: float = 0.0) -> nn.Module:
    return Tokens(4, nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True))


def vectors(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(BATCH, 9, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(VOCABULARY, (BATCH,), generator=generator)


def tokens(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    sequence = torch.randint(VOCABULARY, (BATCH, TIME + 1), generator=generator)
    return sequence[:, :-1], sequence[:, -1]


ALL_TASKS = {
    "mlp": Task(mlp, vectors),
    "convnet": Task(convnet, vectors),
    "lstm": Task(lstm, tokens),
    "transformer": Task(transformer, tokens),
}


def batches(task: Task, num_workers: int, step: int) -> tuple[Tensor, Tensor]:
    """Return all workers' batches, stacked."""
    inputs, targets = zip(*(task.batch(worker, step) for worker in range(num_workers)), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def train(
    task: Task, schedule: Schedule, order: str, make_optimizer: MakeOptimizer, num_steps: int
) -> list[nn.Module]:
    """Return each worker's model, after training all workers in turn."""
    return train_models(task.make, task.loss_of, schedule, order, make_optimizer, num_steps)
