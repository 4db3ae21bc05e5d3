"""Real processes: parity with torch's DDP, the default process group, and torchrun."""

from __future__ import annotations

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

ROOT = Path(__file__).parents[1]


def train_with_ddp(num_steps: int) -> Tensor:
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(wrapped, dist.get_rank(), step).backward()
        optimizer.step()
    return vector_of(model)


def train_with_gossip(topology: str, algorithm: str, name: str, num_steps: int) -> Tensor:
    model = make_model()
    optimizer = ALL_OPTIMIZERS[name](model.parameters())
    gossip = gossamer.decentralize(model, optimizer, topology, algorithm=algorithm)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        dist.all_reduce(torch.ones(1))  # the user's own collective, while ours are in flight
    gossip.close()
    return vector_of(model)


def test_atc_with_sgd_on_the_complete_graph_is_ddp(pool: ProcessPool) -> None:
    """Averaging parameters after a linear update equals averaging gradients before it."""
    ddp = pool.run(train_with_ddp, 20)
    gossip = pool.run(train_with_gossip, "complete", "atc", "sgd_nesterov", 20)
    for expected, result in zip(ddp, gossip, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", reference.ORDERS)
@pytest.mark.parametrize("topology", ["one_peer_exponential", "ring", "aer(workers_per_node=2)"])
def test_processes_equal_the_reference(pool: ProcessPool, topology: str, order: str) -> None:
    """On the default group and its store, with the user's collectives in between."""
    results = pool.run(train_with_gossip, topology, order, "adamw", 11)
    expected = reference.train(parse(topology, 4), order, ALL_OPTIMIZERS["adamw"], 11)
    for result, parameters in zip(results, expected, strict=True):
        torch.testing.assert_close(result, parameters, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("algorithm", "cases"), reference.ALGORITHM_CASES.items())
def test_algorithms_on_processes_equal_the_reference(
    pool: ProcessPool, algorithm: str, cases: tuple[list[str], list[str]]
) -> None:
    """States besides parameters are exchanged on the default group's connections, too."""
    (*_, topology), (optimizer, *_) = cases
    results = pool.run(train_with_gossip, topology, algorithm, optimizer, 11)
    expected = reference.train(parse(topology, 4), algorithm, ALL_OPTIMIZERS[optimizer], 11)
    for result, parameters in zip(results, expected, strict=True):
        torch.testing.assert_close(result, parameters, rtol=0, atol=1e-10)


def test_parity_under_torchrun() -> None:
    """Ranks under torchrun equal the reference: every order, a static and a varying graph.

    All five, two of them as a group, and one alone.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    result = subprocess.run(
        [*command, "5", "-m", "tests.torchrun_parity"],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    for size in (5, 2, 1):
        assert result.stdout.count(f"one of {size} is equal to the reference") == size


def test_processes_that_end_without_close(tmp_path: Path) -> None:
    """Without close() a rank and its slower peer exit with 0; one that raises exits with 1.

    The peers of one that raises fail with an ExchangeError in time; no process aborts or hangs.
    """
    command = [sys.executable, "-m", "tests.exit_without_close", str(tmp_path)]
    subprocess.run(command, check=True, timeout=140)
    codes = {path.stem: path.read_text() for path in tmp_path.glob("*.code")}
    errors = {path.stem: path.read_text() for path in tmp_path.glob("*.err")}
    for rank in range(3):
        assert codes[f"forgets-{rank}"] == "0", errors
        assert codes[f"raises-{rank}"] == "1", errors
    assert "ValueError: on purpose" in errors["raises-1"]
    assert "ExchangeError" in errors["raises-0"]
    assert "ExchangeError" in errors["raises-2"]
