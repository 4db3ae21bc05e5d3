"""Ranks over Gloo equal the reference, for every topology, order and optimizer."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gossamer.gossip import decentralize
from gossamer.gossip.step import Step
from gossamer.topology import parse
from tests import reference
from tests.catalogue import ALL_TOPOLOGIES
from tests.ranks import run_ranks
from tests.reference import ALL_OPTIMIZERS, ORDERS, loss_of, make_model, vector_of

NUM_STEPS = 11


def train_rank(
    group: ProcessGroup,
    text: str,
    order: str,
    optimizer_name: str,
    *,
    delay_ms: float = 0,
    bucket_mb: float = 2e-4,
) -> Tensor:
    """Train one rank as a user would, with buckets so small that several are in flight."""
    model = make_model()
    if group.rank() > 0:  # rank 0's parameters are everyone's start
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, float("nan"))
    optimizer = ALL_OPTIMIZERS[optimizer_name](model.parameters())
    gossip = decentralize(
        model, optimizer, text, process_group=group, order=order, bucket_mb=bucket_mb
    )
    dice = random.Random(group.rank())
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, group.rank(), step).backward()
        time.sleep(dice.uniform(0, delay_ms) / 1e3)
        optimizer.step()
    gossip.close()
    return vector_of(model)


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("text", ALL_TOPOLOGIES)
def test_ranks_equal_the_reference(text: str, order: str) -> None:
    """Eight ranks with random delays: each worker's parameters equal W x to rounding.

    Optimizers alternate over topologies; test_simulation_parity compares all of them with the
    simulation and with ranks.
    """
    names = list(ALL_OPTIMIZERS)
    name = names[(list(ALL_TOPOLOGIES).index(text) + ORDERS.index(order)) % len(names)]
    results = run_ranks(8, lambda group: train_rank(group, text, order, name, delay_ms=1))
    expected = reference.train(parse(text, 8), order, ALL_OPTIMIZERS[name], NUM_STEPS)
    for result, parameters in zip(results, expected, strict=True):
        torch.testing.assert_close(result, parameters, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "text", ["ring", "one_peer_ring", "base_graph(k=1)", "star", "exponential"]
)
def test_any_number_of_ranks(text: str, num_ranks: int, order: str) -> None:
    """One rank, two, and odd numbers, where some workers are idle in some rounds."""
    results = run_ranks(num_ranks, lambda group: train_rank(group, text, order, "adamw"))
    expected = reference.train(parse(text, num_ranks), order, ALL_OPTIMIZERS["adamw"], NUM_STEPS)
    for result, parameters in zip(results, expected, strict=True):
        torch.testing.assert_close(result, parameters, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", ["one_peer_exponential", "torus", "complete", "star"])
def test_overlapped_equals_not_overlapped_exactly(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlapping the exchange with the next step changes no bit of any parameter."""
    overlapped = run_ranks(8, lambda group: train_rank(group, text, "awc", "adamw", delay_ms=2))

    monkeypatch.setattr(Step, "_after_update", _remember_round)
    monkeypatch.setattr(Step, "_before_update", _exchange_now)
    plain = run_ranks(8, lambda group: train_rank(group, text, "awc", "adamw"))
    assert all(torch.equal(a, b) for a, b in zip(overlapped, plain, strict=True))


def _remember_round(step: Any, *_: Any) -> None:
    step.num_steps += 1


def _exchange_now(step: Any, *_: Any) -> None:
    """Run the same round, with nothing in flight between steps."""
    if step.num_steps > 0:
        (round,) = step._context.source.rounds(step.num_steps)
        step._mixer.start(round, step.num_steps)
        step._mixer.finish()


@pytest.mark.parametrize("bucket_mb", [1e-6, 1e-4, 25])
def test_the_size_of_buckets_changes_nothing(bucket_mb: float) -> None:
    """One bucket per parameter, several, or one for all: the same bits."""
    small = run_ranks(
        5, lambda group: train_rank(group, "ring", "awc", "adamw", bucket_mb=bucket_mb)
    )
    large = run_ranks(5, lambda group: train_rank(group, "ring", "awc", "adamw", bucket_mb=1))
    assert all(torch.equal(a, b) for a, b in zip(small, large, strict=True))
