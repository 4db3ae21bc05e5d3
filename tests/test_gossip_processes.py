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

# Jobs of several processes that each import torch: a loaded machine takes its time.
pytestmark = pytest.mark.timeout(150)

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


def torchrun(num_processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program under torchrun's agent."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.run(
        [*command, str(num_processes), *arguments],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
        cwd=Path(__file__).parents[1],
    )


@pytest.mark.parametrize("num_processes", [1, 2, 5])
def test_parity_under_torchrun(num_processes: int) -> None:
    """Ranks that torchrun starts equal the reference: every order, a static and a varying graph."""
    result = torchrun(num_processes, "-m", "tests.torchrun_parity")
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("equal to the reference") == num_processes


def test_the_example_reaches_ddps_accuracy() -> None:
    """Digits on four processes: gossip is within 3 points of DDP, both above 88 %."""
    accuracy: dict[str, float] = {}
    for name in ("ddp", "ddp_to_gossip"):
        result = torchrun(4, str(EXAMPLES / f"{name}.py"))
        found = re.search(r"test accuracy (0\.\d+)", result.stdout)
        assert found, result.stderr[-2000:]
        accuracy[name] = float(found[1])
    assert min(accuracy.values()) > 0.88
    assert abs(accuracy["ddp"] - accuracy["ddp_to_gossip"]) < 0.03


@pytest.mark.parametrize("mode", ["forgets", "raises"])
def test_a_process_that_ends_without_close(mode: str, tmp_path: Path) -> None:
    """One that forgets close() leaves with 0, and its slower peer too; one that raises with 1.

    Its peers then fail with an error of ours, in time; nobody is aborted and nobody hangs.
    """
    command = [sys.executable, "-m", "tests.exit_without_close", mode, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    if mode == "forgets":
        assert [rank.returncode for rank in ranks] == [0, 0, 0], errors
    else:
        assert [rank.returncode for rank in ranks] == [1, 1, 1], errors
        assert "ValueError: on purpose" in errors[1]
        assert "ExchangeError" in errors[0]
        assert "ExchangeError" in errors[2]
