"""The simulation against real ranks over Gloo, and against the plain loop.

On real ranks: every topology × order, and every model × order × optimizer. Against the plain loop,
which test_gossip_parity.py holds against ranks: every topology × order × optimizer with the MLP,
and every topology × order × model with the optimizers in turn: gradient, mixing and update are
functions that know nothing of each other. The whole product on real ranks takes minutes, and runs
only where it is asked for:

    pytest -m full tests/test_simulation_parity.py
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gossamer import Simulation, decentralize
from gossamer.topology import parse
from tests import tasks
from tests.catalogue import ALL_TOPOLOGIES
from tests.ranks import run_ranks
from tests.reference import ALL_OPTIMIZERS, ORDERS
from tests.tasks import ALL_TASKS, Task

NUM_WORKERS = 8
NUM_STEPS = 10
OPTIMIZERS = ("sgd_nesterov", "adamw", "accum_adamw", "smooth_adamw")

# Every model with every optimizer, on the topologies in turn.
PAIRS = list(product(ALL_TASKS, OPTIMIZERS))
CASES = [(text, *PAIRS[i % len(PAIRS)]) for i, text in enumerate(ALL_TOPOLOGIES)]


def simulate(
    task: Task, text: str, order: str, optimizer_name: str, num_workers: int = NUM_WORKERS
) -> Simulation:
    sim = Simulation(
        task.make(),
        task.loss,
        ALL_OPTIMIZERS[optimizer_name],
        workers=num_workers,
        topology=text,
        order=order,
        dtype=torch.float64,
        gradients="vmap",
    )
    for step in range(NUM_STEPS):
        sim.step(*tasks.batches(task, num_workers, step))
    return sim


def train_rank(
    group: ProcessGroup, task: Task, text: str, order: str, optimizer_name: str
) -> nn.Module:
    model = task.make()
    optimizer = ALL_OPTIMIZERS[optimizer_name](model.parameters())
    gossip = decentralize(model, optimizer, text, process_group=group, order=order)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        inputs, targets = task.batch(group.rank(), step)
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    gossip.close()
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers: running statistics are part of what must be equal."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_equal_models(sim: Simulation, expected: list[nn.Module]) -> None:
    for worker, model in enumerate(expected):
        torch.testing.assert_close(
            tensors_of(sim.worker(worker)), tensors_of(model), rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("text", "model", "optimizer"), CASES)
def test_the_simulation_equals_real_ranks(
    text: str, model: str, optimizer: str, order: str
) -> None:
    """Eight ranks over Gloo, worker by worker, running statistics included, to 1e-10."""
    task = ALL_TASKS[model]
    ranks = run_ranks(NUM_WORKERS, lambda group: train_rank(group, task, text, order, optimizer))
    assert_equal_models(simulate(task, text, order, optimizer), ranks)


@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("model", "optimizer"), PAIRS)
@pytest.mark.parametrize("text", ALL_TOPOLOGIES)
def test_every_combination_equals_real_ranks(
    text: str, model: str, optimizer: str, order: str
) -> None:
    """The same for every topology × order × optimizer × model."""
    test_the_simulation_equals_real_ranks(text, model, optimizer, order)


@pytest.mark.parametrize(
    ("model", "optimizers"), [("mlp", 3), ("convnet", 1), ("lstm", 1), ("transformer", 1)]
)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("text", ALL_TOPOLOGIES)
def test_the_simulation_equals_the_plain_loop(
    text: str, order: str, model: str, optimizers: int
) -> None:
    """A module and an optimizer per worker and a matrix product: the same to 1e-10."""
    task = ALL_TASKS[model]
    schedule = parse(text, NUM_WORKERS)
    turn = ALL_TOPOLOGIES.index(text) + list(ALL_TASKS).index(model) + ORDERS.index(order)
    for i in range(optimizers):
        optimizer = OPTIMIZERS[(turn + i) % len(OPTIMIZERS)]
        expected = tasks.train(task, schedule, order, ALL_OPTIMIZERS[optimizer], NUM_STEPS)
        assert_equal_models(simulate(task, text, order, optimizer), expected)
