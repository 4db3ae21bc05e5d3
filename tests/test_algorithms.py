"""Algorithms on both engines: parity with their specification, and what each guarantees."""

from __future__ import annotations

import copy
import math
import random
import time
from contextlib import suppress
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD

from gossamer import Checkpoints, GradScaler, Simulation, decentralize
from gossamer.algorithms import ALGORITHMS, Algorithm, StepContext, mix, parse_algorithm
from gossamer.errors import UserError
from gossamer.gossip import ExchangeError
from gossamer.nonfinite import NonFiniteError
from gossamer.topology import Schedule, from_matrix, parse, ring, spaced, static
from tests import reference
from tests.ranks import run_ranks
from tests.reference import ALGORITHM_CASES, ALL_OPTIMIZERS, loss_of, make_model, vector_of

NUM_STEPS = 9
CASES = [
    (name, topology, optimizers[i % len(optimizers)])
    for name, (topologies, optimizers) in ALGORITHM_CASES.items()
    for i, topology in enumerate(topologies)
]
SIMULATED = [
    (name, topology, optimizer)
    for name, (topologies, optimizers) in ALGORITHM_CASES.items()
    for topology, optimizer in product(topologies, optimizers)
]


def train_rank(
    group: ProcessGroup, topology: Any, optimizer_name: str, delay_ms: float = 0, **options: Any
) -> Tensor:
    """Train one rank as a user would, in small buckets, with random delays."""
    model = make_model()
    optimizer = ALL_OPTIMIZERS[optimizer_name](model.parameters())
    dice = random.Random(group.rank())
    with decentralize(model, optimizer, topology, process_group=group, bucket_mb=2e-4, **options):
        for step in range(NUM_STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, group.rank(), step).backward()
            time.sleep(dice.uniform(0, delay_ms) / 1e3)
            optimizer.step()
    return vector_of(model)


def simulate(topology: Any, optimizer_name: str, workers: int = 8, **options: Any) -> Simulation:
    settings: dict[str, Any] = {"dtype": torch.float64, **options}
    sim = Simulation(
        make_model(),
        nn.functional.mse_loss,
        ALL_OPTIMIZERS[optimizer_name],
        workers,
        topology,
        **settings,
    )
    for step in range(NUM_STEPS):
        batches = [reference.batch(worker, step) for worker in range(workers)]
        inputs, targets = (torch.stack(part) for part in zip(*batches, strict=True))
        sim.step(inputs, targets)
    return sim


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def of_simulation(sim: Simulation) -> list[Tensor]:
    return [vector_of(sim.worker(worker)) for worker in range(sim.num_workers)]


# - Parity


def test_every_algorithm_has_a_specification_and_cases() -> None:
    """Every algorithm of the table has a reference and test cases."""
    assert {*reference.STEPS} == {*ALGORITHMS}
    assert {*ALGORITHM_CASES} == {*ALGORITHMS} - {"awc", "atc"}


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize(("algorithm", "topology", "optimizer"), CASES)
def test_ranks_equal_the_reference(algorithm: str, topology: str, optimizer: str) -> None:
    """Eight ranks over Gloo with random delays: each worker follows the equations."""
    options: Any = {"algorithm": algorithm, "delay_ms": 1}
    ranks = run_ranks(8, lambda group: train_rank(group, topology, optimizer, **options))
    make = ALL_OPTIMIZERS[optimizer]
    assert_equal(ranks, reference.train(parse(topology, 8), algorithm, make, NUM_STEPS))


@pytest.mark.parametrize(("algorithm", "topology", "optimizer"), SIMULATED)
def test_the_simulation_equals_the_reference(algorithm: str, topology: str, optimizer: str) -> None:
    """For every topology and optimizer of an algorithm's cases, to 1e-10."""
    sim = simulate(topology, optimizer, algorithm=algorithm)
    make = ALL_OPTIMIZERS[optimizer]
    assert_equal(
        of_simulation(sim), reference.train(parse(topology, 8), algorithm, make, NUM_STEPS)
    )


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
@pytest.mark.parametrize("topology", ["one_peer_exponential", "complete", "random_matching"])
@pytest.mark.parametrize("every", [2, 4])
def test_local_steps_are_equal_on_both_engines(algorithm: str, topology: str, every: int) -> None:
    """With ``every``, ranks, simulation and the reference agree."""
    options: Any = {"algorithm": algorithm, "every": every}
    expected = reference.train(
        spaced(parse(topology, 4), every), algorithm, ALL_OPTIMIZERS["adamw"], NUM_STEPS
    )
    assert_equal(
        run_ranks(4, lambda group: train_rank(group, topology, "adamw", **options)), expected
    )
    assert_equal(of_simulation(simulate(topology, "adamw", 4, **options)), expected)


# - What each is for


class Bowls(nn.Module):
    """Worker i's loss is ½ Σ a_i (x − c_i)²: different curvatures and different optima."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(6, dtype=torch.float64))

    def forward(self, curvature: Tensor) -> Tensor:
        """Return an output whose squared error to the target is twice the loss."""
        return curvature.sqrt() * self.x


def distance_to_optimum(algorithm: str, steps: int) -> float:
    """Return the mean distance of workers from the optimum of the mean loss."""
    rng = np.random.default_rng(0)
    a = torch.from_numpy(rng.uniform(0.5, 2.0, (16, 1, 6)))
    c = torch.from_numpy(rng.normal(size=(16, 1, 6)))
    best = (a * c).sum(0) / a.sum(0)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * ((output - target) ** 2).sum()

    sim = Simulation(
        Bowls(), loss, lambda p: SGD(p, lr=0.1), 16, "ring", algorithm=algorithm,
        dtype=torch.float64,
    )  # fmt: skip
    for _ in range(steps):
        sim.step(a, a.sqrt() * c)
    return float((sim.parameters["x"] - best).norm(dim=1).mean())


def test_corrections_reach_the_optimum_where_atc_stalls() -> None:
    """Full gradients, constant rate, different curvatures: only atc is biased."""
    assert distance_to_optimum("atc", 4000) > 0.1
    assert distance_to_optimum("gradient_tracking", 4000) < 1e-12
    assert distance_to_optimum("exact_diffusion", 4000) < 1e-10


ONE_WAY = [
    [0.5, 0.5, 0.0, 0.0, 0.0],
    [0.0, 0.5, 0.5, 0.0, 0.0],
    [0.25, 0.0, 0.25, 0.25, 0.25],
    [0.0, 0.0, 0.0, 0.5, 0.5],
    [0.5, 0.0, 0.0, 0.0, 0.5],
]
"""Who takes from whom, one-way; numbers of receivers differ."""


def test_push_sum_reaches_the_true_mean_on_a_directed_graph() -> None:
    """Out-degrees differ, so plain mixing has another limit; Σx/Σw is conserved."""
    one_way = from_matrix(np.array(ONE_WAY), doubly_stochastic=False)
    starts = torch.arange(5, dtype=torch.float64)

    def end(algorithm: str) -> Tensor:
        sim = Simulation(
            nn.Linear(1, 1, bias=False).double(),
            nn.functional.mse_loss,
            lambda p: SGD(p, lr=0.0),
            5,
            one_way,
            algorithm=algorithm,
            dtype=torch.float64,
        )
        sim.parameters["weight"].copy_(starts.view(5, 1, 1))
        for _ in range(200):
            sim.step(torch.zeros(5, 1, 1), torch.zeros(5, 1, 1))
            if algorithm == "push_sum":
                average = sim.average()
                assert isinstance(average, nn.Linear)
                torch.testing.assert_close(average.weight.item(), 2.0)
        return sim.parameters["weight"].flatten()

    torch.testing.assert_close(end("push_sum"), torch.full((5,), 2.0, dtype=torch.float64))
    assert (end("atc") - 2.0).abs().min() > 0.05


def test_local_steps_go_through_all_rounds() -> None:
    """At every = 4 one-peer exponential uses each matching in turn, and reaches consensus."""
    schedule = spaced(parse("one_peer_exponential", 16), 4)
    product = np.eye(16)
    for step in range(16):
        product = schedule.round(step).matrix().toarray() @ product
    np.testing.assert_allclose(product, 1 / 16)
    assert schedule.period == 16
    assert [schedule.round(step).degree for step in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]


def test_a_schedule_of_training_time_counts_steps() -> None:
    """Ada thins out with epochs, however rarely workers exchange."""
    ada = parse("ada(k0=6, gamma=1, steps_per_epoch=8)", 12)
    assert ada.counts == "steps"
    assert spaced(ada, 4).round(31) == ada.round(31)
    assert spaced(parse("random_matching", 12), 4).round(31) == parse("random_matching", 12).round(
        7
    )


# - On ranks


def test_tracking_sends_twice_and_push_sum_a_weight() -> None:
    """Both engines count what is exchanged besides parameters."""

    def sent(group: ProcessGroup, algorithm: str) -> int:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with decentralize(
            model, optimizer, "ring", process_group=group, algorithm=algorithm
        ) as gossip:
            loss_of(model, group.rank(), 0).backward()
            optimizer.step()
            return gossip.bytes_sent

    (once, *_) = run_ranks(4, lambda group: sent(group, "atc"))
    assert run_ranks(4, lambda group: sent(group, "gradient_tracking"))[0] == 2 * once
    assert run_ranks(4, lambda group: sent(group, "push_sum"))[0] == once + 2 * 8
    atc, tracking, push_sum = (
        simulate("ring", "sgd", 4, algorithm=name).bytes_sent[0]
        for name in ("atc", "gradient_tracking", "push_sum")
    )
    assert tracking == 2 * atc
    assert push_sum == atc + 2 * 8 * NUM_STEPS


@pytest.mark.parametrize(
    ("algorithm", "topology"),
    [("gradient_tracking", "one_peer_ring"), ("exact_diffusion", "ring"), ("push_sum", "star")],
)
def test_a_state_continues_what_an_algorithm_keeps(algorithm: str, topology: str) -> None:
    """Ranks that load a state in mid-run end where uninterrupted ranks end."""
    topology = "star(weights=uniform)" if topology == "star" else topology
    optimizer_name = "sgd_nesterov"

    def straight(group: ProcessGroup) -> Tensor:
        return train_rank(group, topology, optimizer_name, algorithm=algorithm)

    def interrupted(group: ProcessGroup) -> Tensor:
        states: Any = None
        for steps in (range(4), range(4, NUM_STEPS)):
            model = make_model()
            optimizer = ALL_OPTIMIZERS[optimizer_name](model.parameters())
            with decentralize(
                model, optimizer, topology, process_group=group, algorithm=algorithm
            ) as gossip:
                if states is not None:
                    with gossip.drained(keep_changes=True):
                        model.load_state_dict(states[0])
                        optimizer.load_state_dict(states[1])
                        gossip.load_state_dict(states[2])
                for step in steps:
                    optimizer.zero_grad()
                    loss_of(model, group.rank(), step).backward()
                    optimizer.step()
                kept = gossip.state_dict()
                states = [
                    {k: v.clone() for k, v in model.state_dict().items()},
                    optimizer.state_dict(),
                    kept,
                ]
        return vector_of(model)

    assert_equal(run_ranks(4, interrupted), run_ranks(4, straight))


def test_a_simulation_continues_what_an_algorithm_keeps() -> None:
    """Tracker, last gradients and weights are part of a simulation's state."""
    for algorithm, topology in (
        ("gradient_tracking", "one_peer_ring"),
        ("push_sum", "erdos_renyi(p=0.4, weights=uniform)"),
    ):
        sim = simulate(topology, "sgd_nesterov", algorithm=algorithm)
        again = Simulation(
            make_model(), nn.functional.mse_loss, ALL_OPTIMIZERS["sgd_nesterov"], 8, topology,
            algorithm=algorithm, dtype=torch.float64,
        )  # fmt: skip
        again.load_state_dict(copy.deepcopy(sim.state_dict()))
        batches = [reference.batch(worker, 50) for worker in range(8)]
        inputs, targets = (torch.stack(part) for part in zip(*batches, strict=True))
        for each in (sim, again):
            each.step(inputs, targets)
        assert_equal(of_simulation(again), of_simulation(sim))


def test_averages_of_push_sum_are_weighed() -> None:
    """``averaged()`` and ``finalize()`` leave Σwz/Σw, as ``Simulation.average`` does."""
    topology = "star(weights=uniform)"

    def body(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        model = make_model()
        optimizer = ALL_OPTIMIZERS["sgd"](model.parameters())
        gossip = decentralize(model, optimizer, topology, process_group=group, algorithm="push_sum")
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss_of(model, group.rank(), step).backward()
            optimizer.step()
        with gossip.averaged():
            looked = vector_of(model)
        gossip.finalize()
        return looked, vector_of(model)

    expected = vector_of(simulate(topology, "sgd", 4, algorithm="push_sum").average())
    plain = torch.stack(of_simulation(simulate(topology, "sgd", 4, algorithm="push_sum"))).mean(0)
    assert (expected - plain).abs().max() > 1e-4
    for looked, final in run_ranks(4, body):
        assert_equal([looked, final], [expected, expected])


def test_push_sum_resumes_on_other_members_from_the_weighed_average(tmp_path: Path) -> None:
    """Four workers saved, three resume: from Σwz/Σw, with weights of one."""

    def save(group: ProcessGroup) -> Tensor:
        model = make_model()
        optimizer = ALL_OPTIMIZERS["sgd"](model.parameters())
        with decentralize(
            model, optimizer, "star(weights=uniform)", process_group=group, algorithm="push_sum"
        ) as gossip:
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                loss_of(model, group.rank(), step).backward()
                optimizer.step()
            Checkpoints(tmp_path, gossip, model=model, optimizer=optimizer).save()
            with gossip.averaged():
                return vector_of(model)

    def restore(group: ProcessGroup) -> tuple[Tensor, float]:
        model = make_model()
        optimizer = ALL_OPTIMIZERS["sgd"](model.parameters())
        with decentralize(
            model, optimizer, "star(weights=uniform)", process_group=group, algorithm="push_sum"
        ) as gossip:
            assert Checkpoints(tmp_path, gossip, model=model, optimizer=optimizer).restore()
            return vector_of(model), gossip.state_dict()["algorithm"]["weight"].item()

    average = run_ranks(4, save)[0]
    for parameters, weight in run_ranks(3, restore):
        assert_equal([parameters], [average])
        assert weight == 1


def test_a_moment_travels_on_its_own_period() -> None:
    """Between exchanges a moment is local; after one on the complete graph all are equal."""
    make = ALL_OPTIMIZERS["adamw"]

    def moments(group: ProcessGroup) -> list[Tensor]:
        model = make_model()
        optimizer = make(model.parameters())
        text = "mixed_moments(moment=exp_avg, period=3)"
        found: list[Tensor] = []
        with decentralize(model, optimizer, "complete", process_group=group, algorithm=text):
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, group.rank(), step).backward()
                optimizer.step()
                states = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
                found.append(torch.cat([state.flatten() for state in states]))
        return found

    first, second, third = run_ranks(3, moments)
    assert not torch.allclose(first[1], second[1])
    torch.testing.assert_close(first[2], second[2])
    torch.testing.assert_close(first[2], third[2])


def whole_tensors(parameters: Any) -> SGD:
    """Return an optimizer with momentum whose update depends on a whole tensor."""

    class Normalized(SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.div_(parameter.grad.norm())
            return super().step(closure)

    return Normalized(parameters, lr=0.05, momentum=0.9)


def test_moments_of_an_optimizer_per_worker_are_refused() -> None:
    """A simulation has no stacked moment of optimizers that are not elementwise."""
    text = "mixed_moments(moment=momentum_buffer)"
    with pytest.raises(UserError, match="needs an elementwise optimizer"):
        Simulation(make_model(), nn.functional.mse_loss, whole_tensors, 4, "ring", algorithm=text)


# - Workers that are left out, local steps, scalers


def train_and_spoil(
    model: nn.Module, optimizer: SGD, rank: int, *, steps: int, at: int, spoiled: int = 2
) -> None:
    """Train; at one step the gradient of one rank is NaN."""
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        (loss * math.nan if (rank, step) == (spoiled, at) else loss).backward()
        optimizer.step()


def test_one_who_is_left_out_ends_tracking_at_once() -> None:
    """The states of the others would be biased for good, so both engines raise at once."""

    def spoil(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.05)
        gossip = decentralize(
            model,
            optimizer,
            "ring",
            process_group=group,
            algorithm="gradient_tracking",
            timeout=timedelta(seconds=2),
        )
        with pytest.raises((NonFiniteError, ExchangeError)) as raised:
            train_and_spoil(model, optimizer, group.rank(), steps=9, at=4)
        assert gossip.num_steps <= 5
        with suppress(RuntimeError):
            gossip.close()
        return str(raised.value)

    said = run_ranks(4, spoil)
    assert all("numbers of 'tracker' must be finite, got those of rank 2" in each for each in said)
    inputs, targets = _zeros(4)
    inputs[2] = math.nan
    for algorithm in ("exact_diffusion", "push_sum"):
        sim = Simulation(
            make_model(), nn.functional.mse_loss, ALL_OPTIMIZERS["sgd"], 4, "ring",
            algorithm=algorithm, dtype=torch.float64,
        )  # fmt: skip
        with pytest.raises(NonFiniteError, match="those of worker 2, which were not at step 0"):
            sim.step(inputs, targets)


@pytest.mark.parametrize("options", [{"every": 3}, {"every": 3, "control": "gamma"}])
def test_a_local_step_leaves_nobody_out(options: dict[str, Any]) -> None:
    """Ranks, which compare decisions in a local step, count the same as a simulation."""
    schedule = Schedule(4, None, lambda step: ring(4))  # its rounds are compared at every step

    def left_out(group: ProcessGroup) -> int:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.05)
        with decentralize(
            model, optimizer, schedule, process_group=group, order="atc", **options
        ) as gossip:
            train_and_spoil(model, optimizer, group.rank(), steps=7, at=3)
            return gossip.stats().left_out.get(2, 0)

    sim = Simulation(
        make_model(), nn.functional.mse_loss, ALL_OPTIMIZERS["sgd"], 4, schedule, "atc",
        dtype=torch.float64, **options,
    )  # fmt: skip
    for step in range(7):
        batches = [reference.batch(worker, step) for worker in range(4)]
        inputs, targets = (torch.stack(part) for part in zip(*batches, strict=True))
        inputs[2] *= math.nan if step == 3 else 1
        sim.step(inputs, targets)
    assert 0 < sim.left_out[2] < 4
    assert run_ranks(4, left_out)[2] == sim.left_out[2]


def test_groups_of_spaced_rounds_all_reduce() -> None:
    """With any number of local steps in between, an average of all is one all-reduce."""

    def messages(group: ProcessGroup) -> int:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        schedule = parse("aer(workers_per_node=4)", 8)
        with decentralize(
            model, optimizer, schedule, process_group=group, order="atc", every=40
        ) as gossip:
            for step in range(40):
                optimizer.zero_grad()
                loss_of(model, group.rank(), step).backward()
                optimizer.step()
            return gossip.messages_sent

    assert run_ranks(8, messages)[0] == 2 * 7


def test_tracking_under_a_scaler_needs_one_optimizer_that_is_not_fused() -> None:
    """Otherwise it would read gradients that are still scaled, or that will be skipped."""

    def body(group: ProcessGroup, num_optimizers: int, fused: bool) -> None:
        model = nn.Linear(4, 2)
        parameters = [*model.parameters()]
        parts = [parameters] if num_optimizers == 1 else [[p] for p in parameters]
        optimizers = [SGD(part, lr=0.1, fused=fused) for part in parts]
        with decentralize(
            model, optimizers, "ring", process_group=group, algorithm="gradient_tracking"
        ) as gossip:
            scaler = GradScaler(gossip, init_scale=4.0)
            scaler.scale(model(torch.ones(1, 4)).sum()).backward()
            words = f"got a GradScaler with {'a fused optimizer' if fused else '2 optimizers'}"
            with pytest.raises(UserError, match=words):
                scaler.step(optimizers[0])

    run_ranks(2, lambda group: body(group, 1, True))
    run_ranks(2, lambda group: body(group, 2, False))


def test_norms_of_push_sum_are_those_of_the_model() -> None:
    """Inside a step parameters are multiplied by the weight; measured norms are not."""
    topology = "star(weights=uniform)"
    expected = np.array([[p.norm().item()] * 4 for p in make_model().parameters()])

    def norms(group: ProcessGroup) -> Any:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.0)
        with decentralize(
            model, optimizer, topology, process_group=group, algorithm="push_sum", norms_every=1
        ) as gossip:
            train_and_spoil(model, optimizer, group.rank(), steps=3, at=9)
            assert gossip.state_dict()["algorithm"]["weight"].item() != 1
            return gossip.last_norms

    np.testing.assert_allclose(run_ranks(4, norms)[0], expected, rtol=1e-10)
    sim = Simulation(
        make_model(), nn.functional.mse_loss, lambda params: SGD(params, lr=0.0), 4, topology,
        algorithm="push_sum", dtype=torch.float64, norms_every=1,
    )  # fmt: skip
    for _ in range(3):
        sim.step(*_zeros(4))
    assert sim.last_norms is not None
    np.testing.assert_allclose(sim.last_norms, expected, rtol=1e-10)


def test_a_state_of_another_algorithm_starts_anew_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In both engines a state of another algorithm is reset, with a warning."""
    tracking = simulate("ring", "sgd", algorithm="gradient_tracking")
    other = simulate("ring", "sgd", algorithm="exact_diffusion")
    other.load_state_dict(tracking.state_dict())
    assert caplog.messages == ["the state is not of exact_diffusion, which is reset"]
    assert_equal(of_simulation(other), of_simulation(tracking))

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with decentralize(
            model, optimizer, "ring", process_group=group, algorithm="exact_diffusion"
        ) as gossip:
            state = gossip.state_dict()
            gossip.load_state_dict({**state, "algorithm": {"name": "gradient_tracking"}})

    run_ranks(2, body)
    assert caplog.messages[1:] == caplog.messages[:1] * 2


@pytest.mark.parametrize("algorithm", ["push_sum", "atc"])
def test_a_scaler_and_two_optimizers_go_with_any_weight(algorithm: str) -> None:
    """The gather between two optimizers does not read parameters."""

    def body(group: ProcessGroup) -> int:
        model = nn.Linear(4, 2)
        optimizers = [SGD([p], lr=0.1) for p in model.parameters()]
        with decentralize(
            model, optimizers, "ring", process_group=group, algorithm=algorithm
        ) as gossip:
            scaler = GradScaler(gossip, init_scale=4.0)
            for step in range(3):
                loss = model(torch.ones(1, 4)).sum() * (math.inf if step == 1 else 1)
                scaler.scale(loss).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
                model.zero_grad()
            return gossip.num_steps

    assert run_ranks(2, body) == [2, 2]


def test_moments_of_push_sum_are_averaged_without_weights(tmp_path: Path) -> None:
    """On other members: parameters by Σwz/Σw, momenta and statistics by a plain mean."""
    topology = "star(weights=uniform)"

    def make() -> tuple[nn.Module, SGD]:
        model = nn.Sequential(make_model(), nn.BatchNorm1d(3, dtype=torch.float64))
        return model, SGD(model.parameters(), lr=0.05, momentum=0.9)

    def tensors(model: nn.Module, optimizer: SGD) -> list[Tensor]:
        momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        return [t.detach().clone() for t in (*momenta, model.get_buffer("1.running_mean"))]

    def save(group: ProcessGroup) -> list[Tensor]:
        model, optimizer = make()
        with decentralize(
            model, optimizer, topology, process_group=group, algorithm="push_sum"
        ) as gossip:
            train_and_spoil(model, optimizer, group.rank(), steps=5, at=9)
            Checkpoints(tmp_path, gossip, model=model, optimizer=optimizer).save()
        return tensors(model, optimizer)

    def restore(group: ProcessGroup) -> list[Tensor]:
        model, optimizer = make()
        with decentralize(
            model, optimizer, topology, process_group=group, algorithm="push_sum"
        ) as gossip:
            assert Checkpoints(tmp_path, gossip, model=model, optimizer=optimizer).restore()
        return tensors(model, optimizer)

    means = [torch.stack(of_all).mean(0) for of_all in zip(*run_ranks(4, save), strict=True)]
    assert_equal(run_ranks(3, restore)[0], means)


class Unfinished(Algorithm):
    """An algorithm that leaves a state other than the parameters in flight."""

    tracked = ("tracker",)

    def after_update(self, context: StepContext, step: int) -> None:
        """Mix, and start an exchange without finishing it."""
        (round,) = context.rounds(step)
        mix(context, round, step)
        context.start(round, step, "tracker")


def test_only_parameters_stay_in_flight() -> None:
    """Saving and draining wait for parameters only, so both engines reject other exchanges."""
    text = "tests.test_algorithms:Unfinished"
    with pytest.raises(UserError, match="got 'tracker' of Unfinished; finish it in after_update"):
        simulate("ring", "sgd", 2, algorithm=text)

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        decentralize(model, optimizer, "ring", process_group=group, algorithm=text)
        loss_of(model, group.rank(), 0).backward()
        with pytest.raises(UserError, match="only parameters may be in flight"):
            optimizer.step()

    run_ranks(2, body)


def test_a_parameter_of_no_optimizer_has_no_rate() -> None:
    """Quasi-global momentum only mixes it, on ranks and in a simulation."""

    def body(group: ProcessGroup) -> Tensor:
        model = make_model()
        optimizer = SGD([*model.parameters()][:2], lr=0.1)
        for parameter in [*model.parameters()][2:]:
            parameter.requires_grad_(False)
        with decentralize(model, optimizer, "ring", process_group=group, algorithm="quasi_global"):
            train_and_spoil(model, optimizer, group.rank(), steps=3, at=9)
        return vector_of(model)

    assert all(vector.isfinite().all() for vector in run_ranks(2, body))


def test_moments_of_a_parameter_without_gradient_are_zero() -> None:
    """An unused layer has no state in any worker's optimizer, and does not change."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = make_model(), nn.Linear(2, 2, dtype=torch.float64)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)

    def body(group: ProcessGroup) -> bool:
        model = Half()
        optimizer = ALL_OPTIMIZERS["adamw"](model.parameters())
        with decentralize(
            model, optimizer, "complete", process_group=group, algorithm="mixed_moments"
        ):
            before = model.unused.weight.detach().clone()
            loss_of(model, group.rank(), 0).backward()
            optimizer.step()
        return torch.allclose(model.unused.weight, before)

    assert all(run_ranks(3, body))


def test_mixed_statistics_are_counted_as_sent() -> None:
    """A simulation counts running statistics if ranks would send them."""
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, affine=False), nn.Linear(64, 1))
    sims = [
        Simulation(
            model, nn.functional.mse_loss, lambda params: SGD(params, lr=0.1), 4, "ring", "atc",
            buffers=buffers,
        )
        for buffers in ("average", "mix")
    ]  # fmt: skip
    for sim in sims:
        sim.step(torch.randn(4, 3, 64), torch.zeros(4, 3, 1))
    # To two neighbours: a mean and a variance.
    assert sims[1].bytes_sent[0] - sims[0].bytes_sent[0] == 2 * 2 * 64 * 4


def test_averages_of_push_sum_are_refused_between_two_optimizers() -> None:
    """Between them some parameters are multiplied by the weight and others are not."""

    def body(group: ProcessGroup) -> None:
        model = nn.Linear(4, 2)
        optimizers = [SGD([p], lr=0.1) for p in model.parameters()]
        with decentralize(
            model, optimizers, "ring", process_group=group, algorithm="push_sum"
        ) as gossip:
            model(torch.ones(1, 4)).sum().backward()
            optimizers[0].step()
            with pytest.raises(UserError, match="must come between two steps of training"):
                gossip.consensus_distance()
            optimizers[1].step()
            gossip.consensus_distance()

    run_ranks(2, body)


# - What is refused


def _pushed() -> Any:
    return parse_algorithm("push_sum").adapt(parse("star(weights=uniform)", 8)).round(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "gradient_tracing"}, "did you mean 'gradient_tracking'"),
        ({"algorithm": "atc", "order": "awc"}, "so only one may be given"),
        ({"algorithm": "d2", "topology": "ring"}, "smallest eigenvalue is above -1/3, got -0.333"),
        ({"algorithm": "d2", "topology": "one_peer_ring"}, "the same round at every step"),
        ({"algorithm": "exact_diffusion", "topology": "exponential"}, "not symmetric"),
        ({"algorithm": "push_sum", "topology": "complete"}, "got an all-reduce at step 0"),
        (
            {"algorithm": "gradient_tracking", "topology": "star(weights=uniform)"},
            "needs rounds that conserve the mean, got another at step 0",
        ),
        ({"algorithm": "push_sum", "every": 2}, "exchanges at every step, got every=2"),
        ({"algorithm": "gradient_tracking", "gossip_steps": 2}, "mixes once per step"),
        ({"algorithm": "gradient_tracking", "control": "auto"}, "got the control"),
        ({"algorithm": "push_sum", "buffers": "mix"}, "use buffers='average'"),
        ({"algorithm": "exact_diffusion", "topology": "complete"}, "use algorithm='d2'"),
        (
            {"algorithm": "d2", "topology": "complete", "dtype": torch.bfloat16},
            "rounding errors of",
        ),
        ({"every": 0}, "every must be an integer from 1 to 16,384 steps, got 0"),
        ({"every": 2.5}, "every must be an integer"),
        ({"every": 4, "control": "constant(c=1)"}, "got every=4 beside .*use 'local_steps"),
        ({"topology": "local_sgd(every=8)"}, "use 'complete' with algorithm='atc' and every=8"),
        ({"algorithm": "mixed_moments"}, "keeps 'exp_avg' for every parameter, got SGD, which"),
        ({"algorithm": "atc", "every": 99, "topology": _pushed()}, "rows sum to one, got another"),
    ],
)
def test_what_an_algorithm_does_not_allow_is_refused(options: dict[str, Any], words: str) -> None:
    """At construction, with the name of an alternative."""
    with pytest.raises(UserError, match=words):
        simulate(options.pop("topology", "ring"), "sgd", **options)


def test_optimizers_that_do_not_fit_are_refused() -> None:
    """Corrections need SGD; push-sum and tracking work with any optimizer."""
    with pytest.raises(UserError, match=r"corrects steps of torch.optim.SGD, got AdamW"):
        simulate("ring", "adamw", algorithm="exact_diffusion")
    adamw = ALL_OPTIMIZERS["adamw"](make_model().parameters())
    with pytest.raises(UserError, match="got AdamW, which keeps step, exp_avg, exp_avg_sq"):
        parse_algorithm("mixed_moments(moment=momentum_buffer)").check_optimizers([adamw])
    groups = SGD([{"params": make_model().parameters(), "momentum": 0.9}], lr=0.1)
    parse_algorithm("mixed_moments(moment=momentum_buffer)").check_optimizers([groups])
    assert not groups.state
    upwards = SGD(make_model().parameters(), lr=0.1, maximize=True)
    with pytest.raises(UserError, match="got SGD and maximize"):
        parse_algorithm("quasi_global").check_optimizers([upwards])


def test_a_round_whose_rows_do_not_sum_to_one_needs_push_sum() -> None:
    """Other algorithms would shrink or inflate parameters."""
    one_way = from_matrix(np.array(ONE_WAY), doubly_stochastic=False)
    pushing = parse_algorithm("push_sum").adapt(static(one_way))
    with pytest.raises(UserError, match="use algorithm='push_sum'"):
        simulate(pushing, "sgd", 5, algorithm="atc")
    with pytest.raises(UserError, match="a round for one step needs awc or atc"):
        simulate("ring", "sgd", 8).step(*_zeros(8), round=_pushed())


def _zeros(workers: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(workers, 1, 5), torch.zeros(workers, 1, 3)


def test_join_is_refused_where_steps_need_gradients() -> None:
    """A rank without batches has no gradient to track."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with (
            decentralize(
                model, optimizer, ring(2), process_group=group, algorithm="gradient_tracking"
            ) as gossip,
            pytest.raises(UserError, match=r"join\(\) continues with steps without a gradient"),
            gossip.join(),
        ):
            pass

    run_ranks(2, body)
