"""Controlled training: both engines decide and train alike, hold their targets, and continue."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, AdamW
from torch.utils._pytree import tree_map

import gossamer
from gossamer.consensus import Needs
from gossamer.errors import UserError
from gossamer.gossip import ExchangeError, decentralize
from gossamer.topology import complete
from tests.own_control import Pi
from tests.ranks import run_ranks
from tests.reference import batch, loss_of, make_model, vector_of

# Every way to act, with every target that reads something else.
CONTROLS: dict[str, tuple[Any, str]] = {
    "repeat": ("constant(c=0.25)", "atc"),
    "repeat, every third step": ("repeat(adaptive(s=0.02), interval=3)", "atc"),
    "repeat to critical": ("critical(share=0.05)", "atc"),
    "phases": ("phases(constant(c=0.5), plain, exact, at=(25, 40))", "atc"),
    "ada_consensus, bytes": ("constant(c=0.25)", "awc"),
    "ada_consensus, degree": ("ada_consensus(adaptive(s=0.02), by=degree)", "awc"),
    "ada_consensus to critical": ("ada_consensus(critical(share=0.05), interval=2)", "awc"),
    "local steps": ("local_steps(constant(c=1.5))", "atc"),
    "local steps, awc": ("local_steps(constant(c=1.5), most=4)", "awc"),
    "gamma": ("gamma(p=1)", "awc"),
    "gamma, atc": ("gamma(p=0.5, start=20)", "atc"),
    "exact": ("exact", "awc"),
    "auto": ("auto", "awc"),
    "of one's own": (Pi(log_distance=-2.5), "atc"),
    "of one's own, awc": (Pi(log_distance=-2.5), "awc"),
}
NUM_WORKERS = 6
NUM_STEPS = 50


def lr_at(step: int) -> float:
    return 0.05 * (0.4 if step >= 30 else 1.0)


def make_optimizer(parameters: object) -> SGD:
    return SGD(parameters, lr=0.05, momentum=0.9)  # pyright: ignore[reportArgumentType]


def make_simulation(control: Any, order: str) -> gossamer.Simulation:
    """Return a simulation that always computes in the same way."""
    return gossamer.Simulation(
        make_model(),
        nn.functional.mse_loss,
        make_optimizer,
        NUM_WORKERS,
        "ring",
        order,
        control=control,
        dtype=torch.float64,
        gradients="vmap",
    )


def simulate(control: Any, order: str) -> tuple[list[Tensor], list[str]]:
    """Return every worker's parameters, and the digest of every decision."""
    sim = make_simulation(control, order)
    digests: list[str] = []
    for step in range(NUM_STEPS):
        batches = [batch(worker, step) for worker in range(NUM_WORKERS)]
        inputs, targets = map(torch.stack, zip(*batches, strict=True))
        sim.optimizer.param_groups[0]["lr"] = lr_at(step)
        sim.step(inputs, targets)
        assert sim.decision is not None
        digests.append(sim.decision.digest)
    return [vector_of(sim.worker(worker)) for worker in range(NUM_WORKERS)], digests


def train(group: ProcessGroup, control: Any, order: str) -> tuple[Tensor, list[str]]:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    digests: list[str] = []
    with decentralize(
        model, optimizer, "ring", process_group=group, order=order, control=control
    ) as gossip:
        for step in range(NUM_STEPS):
            optimizer.param_groups[0]["lr"] = lr_at(step)
            digests.append(take_step(model, optimizer, gossip, group.rank(), step))
    return vector_of(model), digests


@pytest.mark.parametrize("name", CONTROLS)
def test_both_engines_decide_and_train_alike(name: str) -> None:
    """The same decisions at every step, and the same parameters to rounding."""
    control, order = CONTROLS[name]
    expected, decided = simulate(control, order)
    ranks = run_ranks(NUM_WORKERS, lambda group: train(group, control, order))
    for (vector, digests), reference in zip(ranks, expected, strict=True):
        assert digests == decided
        torch.testing.assert_close(vector, reference, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "name", ["repeat", "ada_consensus, degree", "repeat, every third step", "of one's own, awc"]
)
def test_a_controlled_run_continues_where_it_was(name: str) -> None:
    """The controller's state, and what it last saw, are part of a gossip's."""
    control, order = CONTROLS[name]

    def body(group: ProcessGroup, stop: int) -> tuple[Tensor, list[str]]:
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        options: Any = {"process_group": group, "order": order, "control": control}
        gossip = decentralize(model, optimizer, "ring", **options)
        decided: list[str] = []
        for step in range(NUM_STEPS):
            if step == stop:
                saved: list[Any] = [thing.state_dict() for thing in (model, optimizer, gossip)]
                states: list[Any] = [tree_map(_copy, state) for state in saved]
                gossip.close()
                optimizer = make_optimizer(model.parameters())
                gossip = decentralize(model, optimizer, "ring", **options)
                for thing, state in zip((model, optimizer, gossip), states, strict=True):
                    thing.load_state_dict(state)
            decided.append(take_step(model, optimizer, gossip, group.rank(), step))
        gossip.close()
        return vector_of(model), decided

    whole = run_ranks(6, lambda group: body(group, -1))
    continued = run_ranks(6, lambda group: body(group, 37))
    for (vector, decided), (other, also_decided) in zip(whole, continued, strict=True):
        assert torch.equal(vector, other)
        assert decided == also_decided
        assert len(set(decided)) > 1


def take_step(
    model: nn.Module, optimizer: SGD, gossip: gossamer.Gossip, rank: int, step: int
) -> str:
    """Train for a step; return the digest of what was decided."""
    optimizer.zero_grad()
    inputs, targets = batch(rank, step)
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    assert gossip.decision is not None
    return gossip.decision.digest


@pytest.mark.parametrize("order", ["awc", "atc"])
def test_learning_rates_may_differ_between_ranks(order: str) -> None:
    """All decide with one: that of the first rank which still trains, inside join() too."""

    def body(group: ProcessGroup) -> list[str]:
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        options: Any = {"process_group": group, "order": order, "control": "auto"}
        decided: list[str] = []
        with decentralize(model, optimizer, "ring", **options) as gossip:
            for step in range(30):  # past the calibration
                optimizer.param_groups[0]["lr"] = 0.05 / (1 + (step > 10) * group.rank())
                decided.append(take_step(model, optimizer, gossip, group.rank(), step))
            with gossip.join():
                for step in range(3 + group.rank()):
                    optimizer.param_groups[0]["lr"] *= 0.5
                    take_step(model, optimizer, gossip, group.rank(), step)
            decided.append(take_step(model, optimizer, gossip, group.rank(), 0))
        return decided

    first, *others = run_ranks(5, body)
    assert all(other == first for other in others)


@pytest.mark.parametrize("saved_with", ["plain", "exact", "ada_consensus(auto, k_max=2)"])
def test_a_state_of_another_control_starts_the_control_anew(
    saved_with: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Loaded in mid-run, too: nothing that was seen before is used, and a log line says so."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        options: Any = {"process_group": group, "order": "awc"}
        optimizer = make_optimizer(model.parameters())
        with decentralize(model, optimizer, "ring", control=saved_with, **options) as gossip:
            loss_of(model, 0, 0).backward()
            optimizer.step()
            state = gossip.state_dict()
        optimizer = make_optimizer(model.parameters())
        with decentralize(
            model, optimizer, "ring", control="ada_consensus(auto, by=degree)", **options
        ) as gossip:
            for step in range(40):
                take_step(model, optimizer, gossip, group.rank(), step)
            with gossip.drained(keep_changes=True):
                gossip.load_state_dict(state)
            assert gossip.num_steps == 1
            take_step(model, optimizer, gossip, group.rank(), 1)
            assert gossip.decision is not None
            assert math.isinf(gossip.decision.target)  # it calibrates again

    run_ranks(5, body)
    assert "which is reset at step 1" in caplog.text


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    ("control", "order"), [("constant(c=0.25)", "atc"), ("constant(c=0.5)", "awc")]
)
def test_a_target_is_held(control: str, order: str) -> None:
    """On a ring of 16, the exact distance is under 1.1 × target at 95 % of controlled steps."""
    sim = gossamer.Simulation(
        nn.Linear(8, 4),
        nn.functional.mse_loss,
        lambda params: AdamW(params, lr=0.01),
        16,
        "ring",
        order,
        control=control,
    )
    generator = torch.Generator().manual_seed(0)
    within: list[bool] = []
    mixed = math.nan
    for _ in range(300):
        if order == "awc" and sim.decision is not None and math.isfinite(sim.decision.target):
            target, rounds = sim.decision.target, sim.decision.rounds
            before = {name: p.clone() for name, p in sim.parameters.items()}
            matrix = torch.from_numpy(rounds[0].matrix().toarray()).float()
            after = [torch.tensordot(matrix, p, dims=1) for p in before.values()]
            mixed = gossamer.consensus.consensus_distance(after)
            within.append(mixed <= 1.1 * target)
        inputs = torch.randn(16, 4, 8, generator=generator)
        sim.step(inputs, torch.randn(16, 4, 4, generator=generator))
        if order == "atc" and sim.decision is not None and math.isfinite(sim.decision.target):
            within.append(sim.consensus_distance() <= 1.1 * sim.decision.target)
    assert len(within) > 50
    assert sum(within) >= 0.95 * len(within), (sum(within), len(within), mixed)


@pytest.mark.parametrize("order", ["awc", "atc"])
def test_norms_before_mixing_are_the_same_in_both_engines(order: str) -> None:
    """What DBench correlates: every tensor, every worker, at the interval, before it is mixed."""

    def body(group: ProcessGroup) -> list[Any]:
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        options: Any = {"process_group": group, "order": order, "norms_every": 3}
        norms: list[Any] = []
        with decentralize(model, optimizer, "ring", **options) as gossip:
            for step in range(6):
                optimizer.zero_grad()
                inputs, targets = batch(group.rank(), step)
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                norms.append(gossip.last_norms)
        return norms

    sim = gossamer.Simulation(
        make_model(),
        nn.functional.mse_loss,
        make_optimizer,
        3,
        "ring",
        order,
        norms_every=3,
        dtype=torch.float64,
    )
    expected: list[Any] = []
    for step in range(6):
        batches = [batch(worker, step) for worker in range(3)]
        inputs, targets = map(torch.stack, zip(*batches, strict=True))
        sim.step(inputs, targets)
        expected.append(sim.last_norms)
    assert expected[:2] == [None, None]  # measured after the third step, and the sixth
    assert expected[2] is expected[4]
    assert expected[5] is not expected[4]
    assert expected[5].shape == (4, 3)
    for norms in run_ranks(3, body):
        assert norms[:2] == [None, None]
        np.testing.assert_allclose(norms[2:], expected[2:], rtol=1e-12)
    dispersion = gossamer.consensus.dispersion(expected[5])
    assert dispersion.gini.shape == (4,)
    if order == "atc":  # after mixing workers are closer than before
        after = gossamer.consensus.tensor_norms([*sim.parameters.values()])
        assert gossamer.consensus.dispersion(after).gini.mean() < dispersion.gini.mean()


def test_norms_of_local_sgd_are_of_the_step_before_an_average() -> None:
    """Ranks measure the second step of three, and the sixth; the state has what is behind it."""

    def body(group: ProcessGroup) -> list[Any]:
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        options: Any = {"process_group": group, "order": "atc", "norms_every": 3}
        steps: list[int] = []
        with decentralize(model, optimizer, "complete", every=2, **options) as gossip:
            assert "last_norms" not in gossip.state_dict()
            for step in range(7):
                optimizer.zero_grad()
                inputs, targets = batch(group.rank(), step)
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                steps.append(gossip.norms_step)
            norms, state = gossip.last_norms, gossip.state_dict()
            assert norms is not None
            assert gossamer.consensus.dispersion(norms).gini.max() > 0
        with decentralize(model, optimizer, "complete", every=2, **options) as again:
            again.load_state_dict(state)
            assert again.norms_step == 6
            np.testing.assert_array_equal(again.last_norms, norms)
            again.load_state_dict({**state, "last_norms": torch.ones(4, 5)})  # of five workers
            assert (again.norms_step, again.last_norms) == (0, None)
        return steps

    assert run_ranks(3, body) == [[0, 2, 2, 2, 2, 6, 6]] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"control": "constant(c=-1)"}, "needs a finite c > 0"),
        ({"control": "constat(c=1)"}, "did you mean 'constant'"),
        ({"control": "repeat(exact)", "order": "awc"}, "repeat mixes several times per step"),
        ({"control": "exact", "order": "atc", "gossip_steps": 2}, "decides how often to mix"),
    ],
)
def test_controls_that_cannot_act_are_refused(options: dict[str, Any], words: str) -> None:
    """By both engines, when they are built."""
    model = make_model()
    with pytest.raises(UserError, match=words):
        gossamer.Simulation(model, nn.functional.mse_loss, make_optimizer, 4, "ring", **options)

    def body(group: ProcessGroup) -> None:
        model = make_model()
        with pytest.raises(UserError, match=words):
            decentralize(model, make_optimizer(model.parameters()), process_group=group, **options)

    run_ranks(1, body)


class Odd:
    """A policy, and its controller, that is of another mind on rank 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def bind(self, schedule: object, order: str) -> object:
        """Itself."""
        return self

    def start(self, step: int) -> None:
        """Nothing."""

    def save(self, state: None) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        """Nothing."""

    def needs(self, step: int, state: object) -> object:
        """Nothing."""
        return Needs()

    def decide(self, seen: object, state: object) -> tuple[object, object]:
        """Another round on rank 1."""
        round = gossamer.topology.parse("star", 3).round(0) if self._rank == 1 else complete(3)
        return gossamer.consensus.Decision((round,), math.nan, math.inf), state

    def __repr__(self) -> str:
        return "odd"


def test_decisions_that_differ_are_an_error() -> None:
    """A rank that decides otherwise than the others is found before anybody waits for it."""

    def body(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        odd: Any = Odd(group.rank())
        gossip = decentralize(model, optimizer, "ring", process_group=group, control=odd)
        optimizer.step()
        with pytest.raises(ExchangeError) as caught:
            optimizer.step()
        gossip.close()
        return str(caught.value)

    for message in run_ranks(3, body):
        assert "all ranks must mix with the same round, but rank" in message
