"""Real processes: parity with torch's DDP, the default process group, and torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import gossamer
from gossamer.topology import parse
from tests import reference
from tests.pool import ProcessPool
from tests.reference import ALL_OPTIMIZERS, loss_of, make_model, vector_of

EXAMPLES = Path(__file__).parents[1] / "examples"


def train_with_ddp(num_steps: int) -> Tensor:
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(wrapped, dist.get_rank(), step).backward()
        optimizer.step()
    return vector_of(model)


def train_with_gossip(topology: str, order: str, name: str, num_steps: int) -> Tensor:
    model = make_model()
    optimizer = ALL_OPTIMIZERS[name](model.parameters())
    gossip = gossamer.decentralize(model, optimizer, topology, order=order)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        dist.all_reduce(torch.ones(1))  # the user's own collective, while ours are in flight
    gossip.close()
    return vector_of(model)


def test_atc_with_sgd_on_the_complete_graph_is_ddp(pool: ProcessPool) -> None:
    """Averaging parameters after a linear update is averaging gradients before it."""
    ddp = pool.run(train_with_ddp, 20)
    gossip = pool.run(train_with_gossip, "complete", "atc", "sgd_nesterov", 20)
    for expected, result in zip(ddp, gossip, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", reference.ORDERS)
@pytest.mark.parametrize("topology", ["one_peer_exponential", "ring", "aer(workers_per_node=2)"])
def test_processes_equal_the_reference(pool: ProcessPool, topology: str, order: str) -> None:
    """The default group, its real store, and the user's collectives in between."""
    results = pool.run(train_with_gossip, topology, order, "adamw", 11)
    expected = reference.train(parse(topology, 4), order, ALL_OPTIMIZERS["adamw"], 11)
    for result, parameters in zip(results, expected, strict=True):
        torch.testing.assert_close(result, parameters, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_processes", [1, 3])
def test_the_example_trains_under_torchrun(num_processes: int) -> None:
    """Digits under torchrun's agent, on one process and on three: above 88 % on the test set."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    result = subprocess.run(
        [*command, str(num_processes), str(EXAMPLES / "ddp_to_gossip.py")],
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )
    found = re.search(r"test accuracy (0\.\d+)", result.stdout)
    assert found, result.stdout
    assert float(found[1]) > 0.88
