"""Decentralized training in its plainest form: a mixing matrix times stacked parameters.

The specification that the distributed run is compared with, step by step and worker by worker.
``STEPS`` has one function per algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from gossamer.optim import AccumAdamW, SmoothAdamW, tell_num_workers
from gossamer.topology import Round, Schedule

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]

ALL_OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd_nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "accum_adamw": lambda p: AccumAdamW(p, lr=0.01, weight_decay=0.1),
    "smooth_adamw": lambda p: SmoothAdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.005),
}
ORDERS = ("awc", "atc")

# What an algorithm is tried with: a topology that it allows for each, and optimizers.
ALGORITHM_CASES: dict[str, tuple[list[str], list[str]]] = {
    "gradient_tracking": (
        [
            *("ring", "torus", "exponential", "one_peer_exponential", "one_peer_ring", "complete"),
            *("random_matching", "base_graph(k=1)", "star", "aer(workers_per_node=4)"),
        ],
        ["sgd", "sgd_nesterov", "adamw", "accum_adamw", "smooth_adamw", "rmsprop"],
    ),
    "exact_diffusion": (["ring", "torus", "hypercube", "star"], ["sgd_nesterov"]),
    "d2": (["lattice(k=4)", "complete", "star(weights=metropolis)"], ["sgd"]),
    "mixed_moments": (["ring", "one_peer_exponential", "complete"], ["adamw", "accum_adamw"]),
    "quasi_global": (["ring", "one_peer_exponential", "random_matching", "complete"], ["sgd"]),
    "push_sum": (
        [
            *("ring", "exponential", "one_peer_exponential", "random_matching", "od_equidyn"),
            *("erdos_renyi(p=0.4, weights=uniform)", "star(weights=uniform)"),
        ],
        ["sgd_nesterov", "adamw", "accum_adamw"],
    ),
}


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
    schedule: Schedule, algorithm: str, make_optimizer: MakeOptimizer, num_steps: int
) -> list[Tensor]:
    """Return each worker's parameters, as one vector, after training `make_model`."""
    models = train_models(make_model, loss_of, schedule, algorithm, make_optimizer, num_steps)
    return [vector_of(model) for model in models]


def train_models(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int, int], Tensor],
    schedule: Schedule,
    algorithm: str,
    make_optimizer: MakeOptimizer,
    num_steps: int,
) -> list[nn.Module]:
    """Return each worker's model, after training all workers in turn.

    Args:
        make: returns a worker's model before the first step.
        loss: of a model, for a worker and a step.
        schedule: the round of every step.
        algorithm: what a step does.
        make_optimizer: returns a worker's optimizer.
        num_steps: of training.
    """
    models = [make() for _ in range(schedule.num_workers)]
    optimizers = [make_optimizer(model.parameters()) for model in models]
    for optimizer in optimizers:
        tell_num_workers(optimizer, schedule.num_workers)
    memory: dict[str, Any] = {}
    for step in range(num_steps):
        for worker, model in enumerate(models):
            model.zero_grad()
            loss(model, worker, step).backward()
        STEPS[algorithm](models, optimizers, schedule.round(step), memory)
    return models


def update(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def awc(models: list[nn.Module], optimizers: list[Optimizer], round: Round, memory: Any) -> None:
    """Take x ← Opt(W x; g)."""
    mix_(models, weights_among(models, round))
    update(optimizers)


def atc(models: list[nn.Module], optimizers: list[Optimizer], round: Round, memory: Any) -> None:
    """Take x ← W Opt(x; g)."""
    update(optimizers)
    mix_(models, weights_among(models, round))


def gradient_tracking(
    models: list[nn.Module], optimizers: list[Optimizer], round: Round, memory: Any
) -> None:
    """Take y ← W (y + g − g_last), x ← W Opt(x; y)."""
    g = torch.stack([gradient_of(model) for model in models])
    memory["y"] = matrix_of(round) @ (memory.get("y", 0) + g - memory.get("g", 0))
    memory["g"] = g
    for model, y in zip(models, memory["y"], strict=True):
        set_gradient_(model, y)
    update(optimizers)
    put_(models, matrix_of(round) @ stacked(models))


def d2(models: list[nn.Module], optimizers: list[Optimizer], round: Round, memory: Any) -> None:
    """Take x ← W (x + ψ − ψ_last), with ψ = Opt(x; g)."""
    corrected(models, optimizers, matrix_of(round), memory)


def exact_diffusion(
    models: list[nn.Module], optimizers: list[Optimizer], round: Round, memory: Any
) -> None:
    """Take x ← (I + W)/2 (x + ψ − ψ_last), with ψ = Opt(x; g)."""
    weights = matrix_of(round)
    corrected(models, optimizers, (torch.eye(len(weights)) + weights) / 2, memory)


def corrected(
    models: list[nn.Module], optimizers: list[Optimizer], weights: Tensor, memory: Any
) -> None:
    x = stacked(models)
    update(optimizers)
    psi = stacked(models)
    put_(models, weights @ (psi + x - memory.get("psi", x)))
    memory["psi"] = psi


def push_sum(
    models: list[nn.Module], optimizers: list[Optimizer], round: Round, memory: Any
) -> None:
    """Take x ← P Opt(z w; g(z)), w ← P w, z = x / w."""
    w = memory.get("w", torch.ones(len(models), 1, dtype=torch.float64))
    put_(models, stacked(models) * w)
    update(optimizers)
    shares = (matrix_of(round) > 0).double()
    pushes = shares / shares.sum(0) if not round.conserves_mean else matrix_of(round)
    memory["w"] = pushes @ w
    put_(models, pushes @ stacked(models) / memory["w"])


def mixed_moments(
    models: list[nn.Module], optimizers: list[Optimizer], round: Round, memory: Any
) -> None:
    """Take x ← W Opt(x; g), m ← W m."""
    atc(models, optimizers, round, memory)
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        states = [o.state[p] for o, p in zip(optimizers, parameters, strict=True)]
        moments = torch.stack([state["exp_avg"] for state in states])
        mixed = torch.tensordot(matrix_of(round), moments, dims=1)
        for state, moment in zip(states, mixed, strict=True):
            state["exp_avg"].copy_(moment)


def quasi_global(
    models: list[nn.Module], optimizers: list[Optimizer], round: Round, memory: Any
) -> None:
    """Take x ← W (x − η (β m + g)), m ← μ m + (1 − μ) (x_t − x_{t+1}) / η."""
    x, m, lr = stacked(models), memory.get("m", 0), optimizers[0].param_groups[0]["lr"]
    g = torch.stack([gradient_of(model) for model in models])
    for model, y in zip(models, g + 0.9 * m, strict=True):
        set_gradient_(model, y)
    atc(models, optimizers, round, memory)
    memory["m"] = 0.9 * m + 0.1 * (x - stacked(models)) / lr


STEPS: dict[str, Callable[[list[nn.Module], list[Optimizer], Round, Any], None]] = {
    "awc": awc,
    "atc": atc,
    "gradient_tracking": gradient_tracking,
    "exact_diffusion": exact_diffusion,
    "d2": d2,
    "mixed_moments": mixed_moments,
    "push_sum": push_sum,
    "quasi_global": quasi_global,
}


def matrix_of(round: Round) -> Tensor:
    return torch.from_numpy(round.matrix().toarray())


def stacked(models: list[nn.Module]) -> Tensor:
    return torch.stack([vector_of(model) for model in models])


@torch.no_grad()
def put_(models: list[nn.Module], x_WN: Tensor) -> None:
    for model, x_N in zip(models, x_WN, strict=True):
        nn.utils.vector_to_parameters(x_N, model.parameters())


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def set_gradient_(model: nn.Module, y_N: Tensor) -> None:
    start = 0
    for p in model.parameters():
        p.grad = y_N[start : start + p.numel()].view_as(p).clone()
        start += p.numel()


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
