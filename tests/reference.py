"""Decentralized training in its plainest form: a mixing matrix times stacked parameters.

The specification that the distributed run is compared with, step by step and worker by worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from gossamer.optim import AccumAdamW, tell_num_workers
from gossamer.topology import Round, Schedule

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]

ALL_OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd_nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "accum_adamw": lambda p: AccumAdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.005),
}
ORDERS = ("awc", "atc")


def make_model() -> nn.Module:
    """A small network with the same parameters everywhere, in double precision."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    fill_(model)
    return model


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


@torch.no_grad()
def fill_(model: nn.Module) -> None:
    """Draw parameters from a generator of their own: ranks that are threads share torch's."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3, generator=generator)


def batch(worker: int, step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Data that depends on nothing but the worker and the step."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(size, 3, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    inputs, targets = batch(worker, step)
    return nn.functional.mse_loss(model(inputs), targets)


def train(
    schedule: Schedule, order: str, make_optimizer: MakeOptimizer, num_steps: int
) -> list[Tensor]:
    """Return each worker's parameters, as one vector, after training `make_model`."""
    models = train_models(make_model, loss_of, schedule, order, make_optimizer, num_steps)
    return [vector_of(model) for model in models]


def train_models(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int, int], Tensor],
    schedule: Schedule,
    order: str,
    make_optimizer: MakeOptimizer,
    num_steps: int,
) -> list[nn.Module]:
    """Return each worker's model, after training all workers in turn.

    Args:
        make: returns a worker's model before the first step.
        loss: of a model, for a worker and a step.
        schedule: the round of every step.
        order: when a step mixes.
        make_optimizer: returns a worker's optimizer.
        num_steps: of training.
    """
    models = [make() for _ in range(schedule.num_workers)]
    optimizers = [make_optimizer(model.parameters()) for model in models]
    for optimizer in optimizers:
        tell_num_workers(optimizer, schedule.num_workers)
    for step in range(num_steps):
        round = schedule.round(step)
        for worker, model in enumerate(models):
            model.zero_grad()
            loss(model, worker, step).backward()
        if order == "awc":
            mix_(models, weights_among(models, round))
        for optimizer in optimizers:
            optimizer.step()
        if order == "atc":
            mix_(models, weights_among(models, round))
    return models


def weights_among(models: list[nn.Module], round: Round) -> Tensor:
    """Return W, in which nobody mixes with a worker whose parameters are not finite."""
    weights = torch.from_numpy(round.matrix().toarray())
    for worker, model in enumerate(models):
        if vector_of(model).isfinite().all():
            continue
        weights += torch.diag(weights[:, worker])  # others keep that weight on their own
        weights[:, worker] = 0
        stay = next((group for group in round.reduced_groups() if worker in group), [worker])
        weights[stay] = torch.eye(len(models), dtype=weights.dtype)[stay]
    return weights


@torch.no_grad()
def mix_(models: list[nn.Module], weights: Tensor) -> None:
    """Multiply: x ← W x, where a weight of zero stands for no product at all."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        mixed = [
            sum(weight * parameters[sender] for sender, weight in enumerate(row) if weight)
            for row in weights
        ]
        for parameter, value in zip(parameters, mixed, strict=True):
            parameter.copy_(value)


def vector_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
