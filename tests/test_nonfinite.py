"""Parameters that are not finite do not spread to other workers, and are reported."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD

from gossamer import Simulation
from gossamer.errors import UserError
from gossamer.gossip import ExchangeError, NonFiniteError, Stats, decentralize
from gossamer.gossip.exchange import Exchange
from gossamer.gossip.marks import mark_like, marked
from gossamer.nonfinite import ParameterWatch, measured_norms
from gossamer.topology import Schedule, from_matrix, parse, ring
from tests import reference
from tests.catalogue import ALL_TOPOLOGIES
from tests.ranks import run_ranks
from tests.reference import ORDERS, batch, make_model, vector_of
from tests.tasks import ALL_TASKS

NUM_WORKERS = 8
NUM_STEPS = 7
SPOILED, SINCE = 2, 3


def spoiled_batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """Return a batch; from some step on, the targets of one worker are NaN."""
    inputs, targets = batch(worker, step)
    return inputs, targets * (math.nan if (worker, step) == (SPOILED, SINCE) else 1)


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    inputs, targets = spoiled_batch(worker, step)
    return nn.functional.mse_loss(model(inputs), targets)


def optimizer_of(parameters: object) -> SGD:
    return SGD(parameters, lr=0.05, momentum=0.9)  # pyright: ignore[reportArgumentType]


def train(
    model: nn.Module,
    optimizer: SGD,
    rank: int,
    num_steps: int,
    loss: Callable[[nn.Module, int, int], Tensor] = loss_of,
) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()


class Trained(NamedTuple):
    """The results of a rank."""

    parameters: Tensor
    stats: Stats


def train_rank(
    group: ProcessGroup, topology: str | Schedule, order: str, *, bucket_mb: float = 2e-4
) -> Trained:
    model = make_model()
    optimizer = optimizer_of(model.parameters())
    gossip = decentralize(
        model, optimizer, topology, process_group=group, order=order, bucket_mb=bucket_mb
    )
    train(model, optimizer, group.rank(), NUM_STEPS)
    gossip.close()
    return Trained(vector_of(model), gossip.stats())


def simulate(topology: str, order: str, num_steps: int = NUM_STEPS) -> Simulation:
    sim = Simulation(
        make_model(),
        nn.functional.mse_loss,
        optimizer_of,
        workers=NUM_WORKERS,
        topology=topology,
        order=order,
        dtype=torch.float64,
    )
    for step in range(num_steps):
        inputs, targets = zip(*(spoiled_batch(w, step) for w in range(NUM_WORKERS)), strict=True)
        sim.step(torch.stack(inputs), torch.stack(targets))
    return sim


# - Both engines, on every topology


@pytest.mark.parametrize(
    ("topology", "order"), [(text, ORDERS[i % 2]) for i, text in enumerate(ALL_TOPOLOGIES)]
)
def test_a_worker_with_nan_gradients_is_left_out(topology: str, order: str) -> None:
    """Seven of eight workers stay finite, and equal in ranks, simulation and reference.

    The eighth keeps its NaN: neighbours do not repair it.
    """
    ranks = run_ranks(NUM_WORKERS, lambda group: train_rank(group, topology, order))
    sim = simulate(topology, order)
    plain = reference.train_models(
        make_model, loss_of, parse(topology, NUM_WORKERS), order, optimizer_of, NUM_STEPS
    )
    for worker, (rank, expected) in enumerate(zip(ranks, plain, strict=True)):
        for result in (rank.parameters, vector_of(sim.worker(worker))):
            torch.testing.assert_close(
                result, vector_of(expected), rtol=0, atol=1e-12, equal_nan=True
            )
        assert rank.parameters.isfinite().all() == (worker != SPOILED)
        assert rank.stats.left_out.get(worker, 0) == sim.left_out[worker]
    assert sim.left_out[SPOILED] == NUM_STEPS - SINCE - (order == "awc")
    told = {rank for each in ranks for rank in each.stats.left_out}
    assert told == {SPOILED}
    assert max(rank.stats.mean_moved for rank in ranks) == sim.mean_moved


@pytest.mark.parametrize("order", ORDERS)
def test_statistics_that_are_mixed_are_left_out_with_their_worker(order: str) -> None:
    """BatchNorm's statistics turn NaN in a forward pass, and parameters too; both engines."""
    task = ALL_TASKS["convnet"]

    def spoiled(worker: int, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = task.batch(worker, step)
        return inputs * (math.nan if (worker, step) == (SPOILED, SINCE) else 1), targets

    def body(group: ProcessGroup) -> dict[str, Tensor]:
        model = task.make()
        optimizer = optimizer_of(model.parameters())
        with decentralize(
            model, optimizer, "exponential", process_group=group, order=order, buffers="mix"
        ):
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                inputs, targets = spoiled(group.rank(), step)
                task.loss(model(inputs), targets).backward()
                optimizer.step()
        return dict(model.state_dict())

    sim = Simulation(
        task.make(),
        task.loss,
        optimizer_of,
        workers=4,
        topology="exponential",
        order=order,
        buffers="mix",
        dtype=torch.float64,
    )
    for step in range(NUM_STEPS):
        inputs, targets = zip(*(spoiled(worker, step) for worker in range(4)), strict=True)
        sim.step(torch.stack(inputs), torch.stack(targets))
    for worker, state in enumerate(run_ranks(4, body)):
        expected = sim.worker(worker).state_dict()
        torch.testing.assert_close(state, dict(expected), rtol=0, atol=1e-10, equal_nan=True)
        finite = all(bool(tensor.isfinite().all()) for tensor in state.values())
        assert finite == (worker != SPOILED)


def test_parameters_that_a_user_sets_to_nan_are_left_out() -> None:
    """Between two steps, where changes are allowed: the restarted exchange sends marks."""

    def body(group: ProcessGroup) -> tuple[bool, dict[int, int]]:
        model = make_model()
        optimizer = optimizer_of(model.parameters())
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        train(model, optimizer, group.rank(), 2)
        with gossip.drained(keep_changes=True):
            if group.rank() == SPOILED:
                next(model.parameters()).data[0] = math.inf
        train(model, optimizer, group.rank(), 2)
        gossip.close()
        return bool(vector_of(model).isfinite().all()), dict(gossip.stats().left_out)

    left_out = {SPOILED: 2}
    assert run_ranks(5, body) == [
        (True, {}),
        (True, left_out),
        (False, left_out),
        (True, left_out),
        (True, {}),
    ]


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_who_is_left_out_keeps_what_it_has(topology: str) -> None:
    """Its finite numbers, too: neighbours do not silently repair a worker."""

    def body(group: ProcessGroup) -> bool:
        model = make_model()
        optimizer = optimizer_of(model.parameters())
        gossip = decentralize(model, optimizer, topology, process_group=group, order="atc")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += group.rank()
            next(model.parameters())[0, 0] += math.inf if group.rank() == SPOILED else 0
        before = vector_of(model)
        optimizer.step()  # without gradients: it mixes, and nothing else
        gossip.close()
        return torch.equal(before, vector_of(model))

    assert (
        run_ranks(5, body)
        == ([False, False, True, False, False], 5 * [True])[topology == "complete"]
    )


# - What is finite, and what a round is without a worker


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_number_counts_and_large_ones_are_finite(dtype: torch.dtype) -> None:
    """NaN and infinities are found at any index; overflowing sums are not mistaken for them."""
    largest = torch.finfo(dtype).max
    stacked = torch.zeros(6, 3, 1000, dtype=dtype)
    stacked[1, 2, 999] = math.nan
    stacked[2, 0, 0] = math.inf
    stacked[3] = largest
    stacked[4, 1, 1], stacked[4, 2, 2] = math.inf, -math.inf
    small = torch.ones(6, dtype=dtype)
    small[5] = -math.inf
    norms = measured_norms([stacked, small])
    assert np.isnan(norms).tolist() == [False, True, True, False, True, True]
    assert norms[0] == 1


@pytest.mark.parametrize("text", ALL_TOPOLOGIES)
def test_a_round_without_a_worker(text: str) -> None:
    """It is idle, rows sum to one, and symmetric weights conserve the mean of the others."""
    schedule = parse(text, NUM_WORKERS)
    for step in range(4):
        round = schedule.round(step)
        without = round.without([1, 4])
        weights = without.matrix().toarray()
        np.testing.assert_allclose(weights.sum(1), 1)
        for worker in (1, 4):
            assert weights[worker, worker] == 1
            assert weights[:, worker].sum() == 1
        if round.symmetric:
            np.testing.assert_allclose(weights.sum(0), 1)


def test_the_mean_of_the_others_moves_where_weights_are_not_symmetric() -> None:
    """On a directed graph a worker's receivers are not its senders."""
    directed = parse("one_peer_exponential", 8).round(1)
    assert not directed.symmetric
    assert not directed.without([3]).conserves_mean
    assert ring(8).without([3]).conserves_mean


# - Groups


def test_a_group_keeps_its_own_values_however_it_averages() -> None:
    """By an all-reduce, or by messages without a process group; other groups mix."""
    groups = np.kron(np.eye(2), np.full((4, 4), 0.25))
    reduced = Schedule(8, 1, lambda step: from_matrix(groups), "two groups")
    by_messages = Schedule(8, None, lambda step: from_matrix(groups), "two groups")
    for schedule in (reduced, by_messages):
        ranks = run_ranks(8, lambda group, schedule=schedule: train_rank(group, schedule, "atc"))
        plain = reference.train_models(
            make_model, loss_of, schedule, "atc", optimizer_of, NUM_STEPS
        )
        for rank, expected in zip(ranks, plain, strict=True):
            torch.testing.assert_close(
                rank.parameters, vector_of(expected), rtol=0, atol=1e-12, equal_nan=True
            )
        apart = [not torch.equal(ranks[0].parameters, ranks[i].parameters) for i in (1, 3)]
        assert apart == [True, True]
        assert torch.allclose(ranks[4].parameters, ranks[7].parameters, rtol=0, atol=1e-12)
        assert [dict(rank.stats.left_out) for rank in ranks] == 4 * [{2: 4}] + 4 * [{}]


def test_a_worker_whose_neighbours_are_all_left_out_keeps_its_own() -> None:
    """Bit for bit, though weights do not sum to one exactly."""
    own = parse("exponential", 32).round(0).neighbours(0)
    inbox = mark_like(torch.ones(64), 1)
    exchange = Exchange(own.self_weight, inbox, all_or_none=False)
    for sender, weight in zip(own.receives.workers, own.receives.weights, strict=True):
        exchange.take(mark_like(inbox, int(sender)), int(sender), float(weight))
    assert exchange.self_weight == 1.0


def test_statistics_that_are_not_finite_are_not_given_away() -> None:
    """Running statistics are part of an average that is saved, so they are checked."""

    def body(group: ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = optimizer_of(model.parameters())
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        if group.rank() == 1:
            dict(model.named_buffers())["1.running_mean"].fill_(torch.nan)
        with pytest.raises(NonFiniteError, match="those of rank 1"):
            gossip.averaged_state_dict()
        gossip.close()

    run_ranks(2, body)


def test_marks_name_their_ranks_in_a_sum() -> None:
    """A mean of buckets and marks shows whose marks they are; too many if it is short."""
    bucket = torch.ones(8)
    mean = (5 * bucket + mark_like(bucket, 3) + mark_like(bucket, 6)) / 7
    assert marked(mean, range(7)) == [3, 6]
    assert marked(mark_like(bucket, 9), [1, 2, 9]) == [1, 9]
    assert marked(bucket, range(20)) == []


# - After some rounds in a row


def until_it_raises(group: ProcessGroup) -> str:
    """Train with a limit of three rounds; return the error that ends it."""
    model = make_model()
    optimizer = optimizer_of(model.parameters())
    gossip = decentralize(
        model,
        optimizer,
        "ring",
        process_group=group,
        nonfinite_rounds=3,
        timeout=timedelta(seconds=2),
    )
    with pytest.raises((NonFiniteError, ExchangeError)) as raised:
        train(model, optimizer, group.rank(), 12)
    with pytest.raises(ExchangeError, match="parameters must be finite"):  # and from then on
        optimizer.step()
    culprit = getattr(raised.value, "culprit", None) or getattr(raised.value, "workers", None)
    assert culprit in (SPOILED, (SPOILED,))
    with suppress(RuntimeError):
        gossip.close()
    assert vector_of(model).isfinite().all() == (group.rank() != SPOILED)
    return str(raised.value)


def test_after_some_rounds_the_rank_raises_and_is_named_everywhere() -> None:
    """The rank itself raises; the others' errors name it."""
    own = f"parameters must be finite, got those of rank {SPOILED}, which were not in 3 rounds"
    for rank, said in enumerate(run_ranks(4, until_it_raises)):
        assert own in said
        assert said.startswith(own) == (rank == SPOILED)


def test_a_simulation_raises_after_as_many_rounds(caplog: pytest.LogCaptureFixture) -> None:
    """It names the worker, after a warning when the worker was first left out."""
    assert simulate("ring", "atc", SINCE + 9).left_out[SPOILED] == 9
    assert caplog.messages == [
        "the parameters of worker 2 are not finite at step 3: the round leaves them out, and "
        "neighbours keep that weight on their own parameters"
    ]
    with pytest.raises(NonFiniteError, match="got those of worker 2, which were not in 10 rounds"):
        simulate("ring", "atc", SINCE + 10)


def test_a_limit_must_be_a_number_of_rounds() -> None:
    """A negative number raises the same error in both engines."""
    with pytest.raises(UserError, match="nonfinite_rounds must be at least 0, got -1"):
        Simulation(
            make_model(), nn.functional.mse_loss, optimizer_of, workers=2, nonfinite_rounds=-1
        )


# - Absurd values


def diverge(group: ProcessGroup) -> str:
    """Train with 10,000 times the learning rate on one rank; return the error that ends it."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=500 if group.rank() == SPOILED else 0.05)
    gossip = decentralize(
        model, optimizer, "ring", process_group=group, timeout=timedelta(seconds=2)
    )
    with pytest.raises((NonFiniteError, ExchangeError)) as raised:
        train(model, optimizer, group.rank(), 90, reference.loss_of)
    with suppress(RuntimeError):
        gossip.close()
    return str(raised.value)


def test_a_learning_rate_that_is_far_too_high_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the rank at its first step, before all others; then an error follows."""
    ends = run_ranks(4, diverge)
    assert "the parameters of rank 2 have grown from a norm of " in caplog.messages[0]
    assert "in one step, at step 1:" in caplog.messages[0]
    assert all("parameters must be finite, got those of rank " in end for end in ends)


def test_a_simulation_tells_of_growth(caplog: pytest.LogCaptureFixture) -> None:
    """It warns about the worker with absurd targets, in the round after them."""
    sim = Simulation(
        make_model(), nn.functional.mse_loss, optimizer_of, 4, "ring", dtype=torch.float64
    )
    for step in range(2):
        inputs, targets = map(torch.stack, zip(*(batch(w, step) for w in range(4)), strict=True))
        targets[SPOILED] *= 1e5
        sim.step(inputs, targets)
    (said,) = caplog.messages
    assert said.startswith("the parameters of worker 2 have grown from a norm of ")
    assert "at step 1:" in said


def test_parameters_that_are_loaded_have_not_grown(caplog: pytest.LogCaptureFixture) -> None:
    """No warning after a state was loaded or a user changed parameters, nor in a simulation."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = optimizer_of(model.parameters())
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        train(model, optimizer, group.rank(), 1)
        state = gossip.state_dict()
        with gossip.drained(keep_changes=True), torch.no_grad():
            for parameter in model.parameters():
                parameter *= 100
        with gossip.drained(keep_changes=True), torch.no_grad():
            for parameter in model.parameters():
                parameter *= 100
            gossip.load_state_dict(state)
        gossip.close()

    run_ranks(3, body)
    sim = simulate("ring", "atc", 1)
    state = sim.state_dict()
    for tensor in state["parameters"].values():
        tensor *= 100
    sim.load_state_dict(state)
    inputs, targets = map(torch.stack, zip(*(batch(w, 1) for w in range(8)), strict=True))
    sim.optimizer.param_groups[0]["lr"] = 0
    sim.step(inputs, targets)
    assert not caplog.messages


def test_growth_is_told_once_of_each(caplog: pytest.LogCaptureFixture) -> None:
    """From the initial norm on; normal growth, or growth from zero, does not warn."""
    watch = ParameterWatch("worker", range(3), np.array([1.0, 2.0, 0.0]), 10, logging.getLogger())
    for step in range(3):
        watch.look(np.array([9.0, 21.0 * 11**step, 5.0]), step)
    assert caplog.messages == [
        "the parameters of worker 1 have grown from a norm of 2 to 21 in one step, at step 0: "
        "other workers mix with them; check its learning rate, gradients and data"
    ]


def test_sketches_tell_who_is_far_outside(caplog: pytest.LogCaptureFixture) -> None:
    """In both engines, once, wherever sketches are gathered; similar workers do not warn."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = optimizer_of(model.parameters())
        gossip = decentralize(model, optimizer, "ring", process_group=group, order="atc")
        train(model, optimizer, group.rank(), 2)
        gossip.sketches()
        with gossip.drained(), torch.no_grad():
            for parameter in model.parameters():
                parameter += 1e3 * (group.rank() == SPOILED)
            gossip.sketches()
            gossip.sketches()
        gossip.close()

    run_ranks(4, body)
    assert len(caplog.messages) == 4
    assert all("rank 2 are" in said and "times as far" in said for said in caplog.messages)
    caplog.clear()
    sim = simulate("ring", "atc", SINCE)
    sim.sketches()
    assert not caplog.messages
    for parameter in sim.parameters.values():
        parameter[SPOILED] += 1e3
    sim.sketches()
    sim.sketches()
    (said,) = caplog.messages
    assert said.startswith("the parameters of worker 2 are")


# - Averages


def test_an_average_that_is_not_finite_is_not_given_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Saving it raises on every rank and names the rank; evaluating it warns."""

    def body(group: ProcessGroup) -> list[str]:
        model = make_model()
        optimizer = optimizer_of(model.parameters())
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        train(model, optimizer, group.rank(), SINCE + 2)
        said: list[str] = []
        for call in (gossip.averaged_state_dict, gossip.finalize):
            with pytest.raises(NonFiniteError) as raised:
                call()
            said.append(str(raised.value))
        caplog.clear()
        gossip.gather(0)
        with gossip.averaged():
            assert not vector_of(model).isfinite().all()
        gossip.close()
        assert vector_of(model).isfinite().all() == (group.rank() != SPOILED)
        return said

    for saved, final in run_ranks(4, body):
        assert saved.startswith("averaged_state_dict() must average parameters that are finite")
        assert final.startswith("finalize() must")
        assert "those of rank 2, which" in final
    assert caplog.messages == 4 * [
        "averaged() averages parameters that are not finite, those of rank 2"
    ]


def test_empty_parameters_are_finite() -> None:
    """A tensor without elements is finite, in both engines."""
    assert measured_norms([torch.empty(3, 0, 4), torch.ones(3, 1)]).tolist() == [1, 1, 1]
    assert marked(mark_like(torch.empty(0), 1), [1]) == []
