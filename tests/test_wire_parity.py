"""Ranks over Gloo equal the simulation bit for bit, for every wire format.

Both engines compute each worker's gradient by itself here, so numbers are equal before they are
rounded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gossamer import Simulation, decentralize
from gossamer.errors import UserError
from gossamer.gossip.telemetry import Stats
from gossamer.topology import Schedule, from_matrix, parse
from gossamer.wire import WIRES
from tests.catalogue import ALL_TOPOLOGIES
from tests.ranks import run_ranks
from tests.reference import ALL_OPTIMIZERS, vector_of

NUM_WORKERS = 8
NUM_STEPS = 9
DISTURBED_AT = 3
BUCKET_MB = 2e-4  # a few buckets

ALL_WIRES = [*WIRES, "modulo(bits=4)"]  # a new format joins by itself
CODED = [wire for wire in ALL_WIRES if wire != "fp32"]
RANGED = ["modulo(bits=8)", "modulo(bits=4)"]
MAIN = ["ring", "one_peer_exponential"]


class Trained(NamedTuple):
    """The results of one worker."""

    parameters: Tensor
    stats: Stats


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    dice = torch.Generator().manual_seed(0)  # not torch's own, which ranks as threads share
    for p in model.parameters():
        nn.init.uniform_(p, -0.4, 0.4, generator=dice)
    return model


def batch(
    worker: int, step: int, dtype: torch.dtype = torch.float32, *, alike: bool = False
) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(4, 5, generator=dice, dtype=torch.float64)
    y = torch.randn(4, 3, generator=dice, dtype=torch.float64) + (1 if alike else worker)
    return x.to(dtype), y.to(dtype)


def disturb_(parameters: Iterable[Tensor], by: float) -> None:
    """Move some parameters far away from those of all others."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.view(-1)[::2] += by


def train_ranks(
    num: int,
    topology: Any,
    optimizer: str,
    *,
    dtype: torch.dtype = torch.float32,
    disturbed: float = 0.0,
    rests: int = 0,
    **options: Any,
) -> list[Trained]:
    """Train the way a user would; where it is asked for, rank 1 is disturbed once.

    Args:
        num: of ranks.
        topology: of gossip.
        optimizer: by name.
        dtype: of parameters.
        disturbed: how far rank 1 is moved.
        rests: so many steps are taken with a learning rate of zero, which grows then; all ranks
            have data of one kind.
        options: of gossip.
    """

    def body(group: ProcessGroup) -> Trained:
        model = make_model(dtype)
        chosen = ALL_OPTIMIZERS[optimizer](model.parameters())
        gossip = decentralize(
            model, chosen, topology, process_group=group, bucket_mb=BUCKET_MB, **options
        )
        for step in range(NUM_STEPS):
            if disturbed and step == DISTURBED_AT and group.rank() == 1:
                disturb_(model.parameters(), disturbed)
            warm_up(chosen, step, rests)
            chosen.zero_grad()
            x, y = batch(group.rank(), step, dtype, alike=rests > 0)
            nn.functional.mse_loss(model(x), y).backward()
            chosen.step()
        gossip.close()
        return Trained(vector_of(model), gossip.stats())

    return run_ranks(num, body)


def warm_up(optimizer: torch.optim.Optimizer, step: int, rests: int) -> None:
    if rests:
        optimizer.param_groups[0]["lr"] = 0.02 * max(0, step + 1 - rests)


def make_simulation(
    num: int, topology: Any, optimizer: str, dtype: torch.dtype = torch.float32, **options: Any
) -> Simulation:
    return Simulation(
        make_model(dtype),
        nn.functional.mse_loss,
        ALL_OPTIMIZERS[optimizer],
        workers=num,
        topology=topology,
        dtype=dtype,
        gradients="loop",
        bucket_mb=BUCKET_MB,
        **options,
    )


def simulate(
    num: int,
    topology: Any,
    optimizer: str,
    *,
    disturbed: float = 0.0,
    rests: int = 0,
    **options: Any,
) -> Simulation:
    sim = make_simulation(num, topology, optimizer, **options)
    for step in range(NUM_STEPS):
        if disturbed and step == DISTURBED_AT:
            disturb_([stacked[1] for stacked in sim.parameters.values()], disturbed)
        warm_up(sim.optimizer, step, rests)
        take_step(sim, step, alike=rests > 0)
    return sim


def take_step(sim: Simulation, step: int, *, alike: bool = False) -> None:
    dtype = next(iter(sim.parameters.values())).dtype
    batches = [batch(worker, step, dtype, alike=alike) for worker in range(sim.num_workers)]
    inputs, targets = zip(*batches, strict=True)
    sim.step(torch.stack(inputs), torch.stack(targets))


def assert_equal_bits(ranks: list[Trained], sim: Simulation) -> None:
    for rank, (parameters, stats) in enumerate(ranks):
        torch.testing.assert_close(
            parameters, vector_of(sim.worker(rank)), rtol=0, atol=0, equal_nan=True
        )
        assert sum(stats.undecoded.values()) == sim.undecoded[rank]


def reduces(topology: str, num: int) -> bool:
    schedule = parse(topology, num)
    rounds = [schedule.round(step) for step in range(schedule.period or NUM_STEPS)]
    return any(round.reduces.any() for round in rounds)


BY_MESSAGES = [topology for topology in ALL_TOPOLOGIES if not reduces(topology, NUM_WORKERS)]


@pytest.mark.parametrize("wire", CODED)
def test_ranks_equal_the_simulation(wire: str) -> None:
    """Topologies, orders and optimizers in turn: no bit differs, and no count."""
    others = [text for text in BY_MESSAGES if text not in MAIN]
    for index, topology in enumerate([*MAIN, *others[CODED.index(wire) :: len(CODED)]]):
        options: dict[str, Any] = {"wire": wire, "order": ("awc", "atc")[index % 2]}
        optimizer = ["adamw", "sgd_nesterov", "rmsprop"][index % 3]
        ranks = train_ranks(NUM_WORKERS, topology, optimizer, **options)
        assert_equal_bits(ranks, simulate(NUM_WORKERS, topology, optimizer, **options))


@pytest.mark.parametrize("wire", CODED)
def test_float64(wire: str) -> None:
    """Parameters that are not float32 are equal bit for bit, too."""
    ranks = train_ranks(4, "ring", "sgd", dtype=torch.float64, wire=wire)
    assert_equal_bits(ranks, simulate(4, "ring", "sgd", dtype=torch.float64, wire=wire))


@pytest.mark.parametrize("wire", CODED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters(wire: str, dtype: torch.dtype) -> None:
    """Both engines start equal, and mix to the same bits.

    Mixing only: 16-bit gradients differ between engines in the last bit.
    """

    def move_(parameters: Iterable[Tensor], worker: int, step: int) -> None:
        dice = torch.Generator().manual_seed(1000 * worker + step)
        for p in parameters:
            p.data.add_(0.05 * torch.randn(p.shape, generator=dice).to(dtype))

    def body(group: ProcessGroup) -> Trained:
        model = make_model(dtype)
        chosen = torch.optim.SGD(model.parameters(), lr=0.0)
        options: dict[str, Any] = {"wire": wire, "order": "atc", "bucket_mb": BUCKET_MB}
        gossip = decentralize(model, chosen, "ring", process_group=group, **options)
        for step in range(4):
            move_(model.parameters(), group.rank(), step)
            chosen.zero_grad()
            nn.functional.mse_loss(
                model(torch.ones(1, 5, dtype=dtype)), torch.ones(1, 3, dtype=dtype)
            ).backward()
            chosen.step()
        gossip.close()
        return Trained(vector_of(model), gossip.stats())

    sim = make_simulation(4, "ring", "sgd", dtype, wire=wire, order="atc")
    sim.optimizer.param_groups[0]["lr"] = 0.0
    for step in range(4):
        for worker in range(4):
            move_([stacked[worker] for stacked in sim.parameters.values()], worker, step)
        take_step(sim, step)
    assert_equal_bits(run_ranks(4, body), sim)


@pytest.mark.parametrize("reduces", [True, False])
def test_16_bit_parameters_in_groups(reduces: bool) -> None:
    """With bf16, by all-reduce or by messages: unchanged, two bytes each.

    Groups of rounds that never repeat use messages, as no process group is open for them.
    """
    thirds = from_matrix([[1 / 3] * 3 + [0]] * 3 + [[0, 0, 0, 1]])
    assert thirds.reduces.any()
    topology = "complete" if reduces else Schedule(4, None, lambda step: thirds, "thirds")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "order": "atc"}
    coded, whole = (train_ranks(4, topology, "sgd", wire=w, **options) for w in ("bf16", "fp32"))
    for one, other in zip(coded, whole, strict=True):
        assert one.stats.bytes_sent == other.stats.bytes_sent
        torch.testing.assert_close(one.parameters, other.parameters)


@pytest.mark.parametrize(
    ("algorithm", "topology"),
    [("gradient_tracking", "ring"), ("push_sum", "star"), ("push_sum", "one_peer_exponential")],
)
def test_any_state_travels_in_bf16(algorithm: str, topology: str) -> None:
    """Trackers, and the weighted parameters of push-sum."""
    options: dict[str, Any] = {"wire": "bf16", "algorithm": algorithm}
    ranks = train_ranks(4, topology, "sgd", **options)
    assert_equal_bits(ranks, simulate(4, topology, "sgd", **options))


@pytest.mark.parametrize("topology", ["complete", "aer(workers_per_node=4)"])
def test_groups_reduce_in_full(topology: str) -> None:
    """With bf16 an all-reduce is the same as without: partial sums are not rounded."""
    ranks = train_ranks(NUM_WORKERS, topology, "sgd", wire="bf16", dtype=torch.float64)
    sim = simulate(NUM_WORKERS, topology, "sgd", wire="bf16", dtype=torch.float64)
    for rank, trained in enumerate(ranks):
        expected = vector_of(sim.worker(rank))
        torch.testing.assert_close(trained.parameters, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wire", ALL_WIRES)
def test_both_engines_count_the_same_messages_and_bytes(wire: str) -> None:
    """One message per bucket; ranks also send the padding between tensors."""
    ranks = train_ranks(4, "ring", "sgd", wire=wire, order="atc", dtype=torch.float64)
    sim = simulate(4, "ring", "sgd", wire=wire, order="atc", dtype=torch.float64)
    for rank, (_, stats) in enumerate(ranks):
        assert stats.messages_sent == sim.messages_sent[rank]
        assert 1 <= stats.bytes_sent / sim.bytes_sent[rank] < 1.3


# - Fragments


@pytest.mark.parametrize("wire", ALL_WIRES)
def test_fragments_in_turn(wire: str) -> None:
    """Both engines exchange the same buckets at the same steps; with and without local steps."""
    for order, every in (("awc", 1), ("atc", 2)):
        options: dict[str, Any] = {"wire": wire, "order": order, "every": every, "fragments": 3}
        ranks = train_ranks(4, "one_peer_exponential", "sgd", **options)
        sim = simulate(4, "one_peer_exponential", "sgd", **options)
        for rank, trained in enumerate(ranks):
            expected = vector_of(sim.worker(rank))
            # A mean of two in one pass over memory or in two differs in the last bit.
            tolerance = 1e-6 if wire == "fp32" else 0.0
            torch.testing.assert_close(trained.parameters, expected, rtol=0, atol=tolerance)
            if order == "atc":
                assert trained.stats.messages_sent == sim.messages_sent[rank]


def test_every_fragment_goes_through_all_rounds() -> None:
    """With its own exchanges: on one-peer exponential each fragment averages exactly."""
    sim = make_simulation(4, "one_peer_exponential", "sgd", order="atc", fragments=2)
    dice = torch.Generator().manual_seed(1)
    for stacked in sim.parameters.values():
        stacked.copy_(torch.randn(stacked.shape, generator=dice))
    sim.optimizer.param_groups[0]["lr"] = 0.0
    equal = list[int]()
    for step in range(4):
        take_step(sim, step)
        means = [(s - s.mean(0)).abs().max() < 1e-6 for s in sim.parameters.values()]
        equal.append(sum(map(bool, means)))
    # The largest bucket is the first fragment, all others are the second.
    assert equal == [0, 0, 1, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 0}, "fragments must be an integer from 1 to 1,024, got 0"),
        (
            {"fragments": 9},
            "fragments=9 needs at least as many parameters, got 4; use at most fragments=4",
        ),
        ({"fragments": 2, "algorithm": "push_sum"}, "push_sum exchanges all parameters at once"),
        (
            {"fragments": 2, "control": "constant(c=1)"},
            "a control decides on exchanges of all parameters",
        ),
    ],
)
def test_fragments_that_cannot_be(options: dict[str, Any], message: str) -> None:
    """They raise at construction, in both engines."""
    with pytest.raises(UserError) as raised:
        make_simulation(4, "ring", "sgd", **options)
    assert message in str(raised.value)

    def body(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = ALL_OPTIMIZERS["sgd"](model.parameters())
        with pytest.raises(UserError) as raised:
            decentralize(
                model, optimizer, "ring", process_group=group, bucket_mb=BUCKET_MB, **options
            )
        return str(raised.value)

    assert all(message in said for said in run_ranks(4, body))


# - What is known of ranges


@pytest.mark.parametrize("wire", RANGED)
@pytest.mark.parametrize("order", ["awc", "atc"])
def test_a_warm_up_from_zero_is_decoded(wire: str, order: str) -> None:
    """Exchanges before anything moved leave the range at the common start.

    Four bits have little margin for a rate that doubles: a few messages of 192 fail.
    """
    options: dict[str, Any] = {"wire": wire, "order": order, "rests": 3}
    sim = simulate(NUM_WORKERS, "one_peer_exponential", "sgd", **options)
    assert sim.undecoded.sum() <= {"modulo(bits=8)": 0, "modulo(bits=4)": 6}[wire]
    if order == "awc":
        ranks = train_ranks(NUM_WORKERS, "one_peer_exponential", "sgd", **options)
        assert_equal_bits(ranks, sim)


@pytest.mark.parametrize("wire", RANGED)
def test_a_run_in_full_goes_on_in_few_bits(wire: str, caplog: pytest.LogCaptureFixture) -> None:
    """The unknown distance of workers is found within a few exchanges, with a warning.

    Both engines need the same exchanges, and do not mix what they cannot decode.
    """
    after: dict[str, Any] = {"wire": wire, "order": "awc"}
    first = make_simulation(4, "ring", "sgd", order="awc")
    second = make_simulation(4, "ring", "sgd", **after)
    for step in range(3):
        take_step(first, step)
    second.load_state_dict(first.state_dict())
    assert "ranges are reset" in caplog.text
    undecoded: list[int] = []
    for step in range(3, NUM_STEPS):
        take_step(second, step)
        undecoded.append(int(second.undecoded.sum()))
    assert 0 < undecoded[0] <= undecoded[3] == undecoded[-1]

    def body(group: ProcessGroup) -> Trained:
        model = make_model()
        chosen = ALL_OPTIMIZERS["sgd"](model.parameters())
        options: dict[str, Any] = {"process_group": group, "bucket_mb": BUCKET_MB}
        gossip = decentralize(model, chosen, "ring", **options, **after)
        with gossip.drained(keep_changes=True):
            model.load_state_dict(first.worker(group.rank()).state_dict())
            gossip.load_state_dict({**gossip.state_dict(), "num_steps": 3, "wire": []})
        for step in range(3, NUM_STEPS):
            chosen.zero_grad()
            x, y = batch(group.rank(), step)
            nn.functional.mse_loss(model(x), y).backward()
            chosen.step()
        gossip.close()
        return Trained(vector_of(model), gossip.stats())

    assert_equal_bits(run_ranks(4, body), second)


# - What goes wrong


@pytest.mark.parametrize("wire", RANGED)
@pytest.mark.parametrize("topology", ["ring", "one_peer_exponential"])
def test_what_is_out_of_range_is_not_mixed(
    wire: str, topology: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that jumps away is detected, counted and logged equally by both engines.

    The range widens until its messages are decoded, and mixing continues.
    """
    options: dict[str, Any] = {"wire": wire, "order": "atc", "disturbed": 5.0}
    ranks = train_ranks(4, topology, "sgd", **options)
    sim = simulate(4, topology, "sgd", **options)
    assert_equal_bits(ranks, sim)
    assert sim.undecoded.sum() > 0
    assert any(1 in rank.stats.undecoded for rank in ranks)
    # On a ring two send to each other, and neither takes what the other cannot.
    one_way = topology != "ring"
    assert (sim.mean_moved > 0) == one_way
    assert any(rank.stats.mean_moved > 0 for rank in ranks) == one_way
    assert "could not decode a bucket of rank" in caplog.text
    assert "could not decode a bucket of worker" in caplog.text
    everything = torch.stack([trained.parameters for trained in ranks])
    assert everything.isfinite().all()


@pytest.mark.parametrize("wire", CODED)
def test_a_worker_that_is_not_finite_is_left_out(wire: str) -> None:
    """As in full precision: marks are sent in its place, and never decoded as numbers."""
    options: dict[str, Any] = {
        "wire": wire,
        "order": "atc",
        "disturbed": math.nan,
        "nonfinite_rounds": 0,
    }
    ranks = train_ranks(4, "ring", "sgd", **options)
    sim = simulate(4, "ring", "sgd", **options)
    assert_equal_bits(ranks, sim)
    rounds = NUM_STEPS - DISTURBED_AT
    assert sim.left_out.tolist() == [0, rounds, 0, 0]
    assert [rank.stats.left_out.get(1) for rank in ranks] == [rounds, rounds, rounds, None]
    assert [bool(rank.parameters.isfinite().all()) for rank in ranks] == [True, False, True, True]
    assert not any(rank.stats.undecoded.get(1) for rank in ranks if "8" in wire)


# - State


@pytest.mark.parametrize("wire", CODED)
@pytest.mark.parametrize("saved_at", [1, 5])
def test_a_run_continues_to_the_bit(wire: str, saved_at: int) -> None:
    """Ranges are part of a state, in both engines; before the first exchange, the start."""
    options: dict[str, Any] = {"wire": wire, "order": "awc", "every": 2}
    whole = simulate(4, "ring", "adamw", **options)
    first, second = (make_simulation(4, "ring", "adamw", **options) for _ in range(2))
    for step in range(saved_at):
        take_step(first, step)
    second.load_state_dict(first.state_dict())
    for step in range(saved_at, NUM_STEPS):
        take_step(second, step)
    assert_equal_bits(continued_ranks(saved_at, "ring", "adamw", **options), second)
    for name, stacked in whole.parameters.items():
        assert torch.equal(stacked, second.parameters[name])


def test_a_state_may_be_taken_while_messages_travel() -> None:
    """It is the state before them, whether or not they have been encoded or have arrived."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        chosen = ALL_OPTIMIZERS["sgd"](model.parameters())
        options: dict[str, Any] = {"process_group": group, "bucket_mb": BUCKET_MB}
        gossip = decentralize(model, chosen, "ring", wire="modulo(bits=8)", **options)
        for step in range(3):
            chosen.zero_grad()
            x, y = batch(group.rank(), step)
            nn.functional.mse_loss(model(x), y).backward()
            chosen.step()
            in_flight = repr(gossip.state_dict()["wire"])
            with gossip.drained():
                assert repr(gossip.state_dict()["wire"]) == in_flight
        gossip.close()

    run_ranks(2, body)


def continued_ranks(saved_at: int, topology: str, optimizer: str, **options: Any) -> list[Trained]:
    """Train four ranks, and resume on new ones from their state."""

    def body(group: ProcessGroup) -> Trained:
        states: list[Any] = []
        for steps in (range(saved_at), range(saved_at, NUM_STEPS)):
            model = make_model()
            chosen = ALL_OPTIMIZERS[optimizer](model.parameters())
            gossip = decentralize(
                model, chosen, topology, process_group=group, bucket_mb=BUCKET_MB, **options
            )
            if states:
                with gossip.drained(keep_changes=True):
                    for thing, state in zip((model, chosen, gossip), states, strict=True):
                        thing.load_state_dict(state)
            for step in steps:
                chosen.zero_grad()
                x, y = batch(group.rank(), step)
                nn.functional.mse_loss(model(x), y).backward()
                chosen.step()
            with gossip.drained():
                states = [copy.deepcopy(t.state_dict()) for t in (model, chosen, gossip)]
            gossip.close()
        return Trained(vector_of(model), gossip.stats())

    return run_ranks(4, body)


# - What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "gradient_tracking"}, "gradient_tracking, which exchanges tracker"),
        ({"algorithm": "push_sum"}, "push_sum, which exchanges weighted parameters"),
        ({"algorithm": "mixed_moments"}, "mixed_moments, which exchanges moment"),
        ({"topology": "complete"}, "got an all-reduce at step 0 of complete; use wire='bf16'"),
        ({"control": "auto"}, "got a control, which may choose an all-reduce"),
        ({"wire": "modulo(bits=5)"}, "modulo has 8 or 4 bits per number, got 5"),
        ({"wire": "int8"}, "unknown wire 'int8'"),
        ({"bucket_mb": 0}, "bucket_mb must be above 0, got 0"),
    ],
)
def test_what_cannot_travel_is_refused_at_construction(
    options: dict[str, Any], message: str
) -> None:
    """By name, in both engines, with an alternative."""
    given: dict[str, Any] = {"topology": "ring", "wire": "modulo", **options}

    def body(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = ALL_OPTIMIZERS["adamw"](model.parameters())
        with pytest.raises(UserError) as raised:
            decentralize(model, optimizer, process_group=group, **given)
        return str(raised.value)

    assert all(message in said for said in run_ranks(4, body))
    with pytest.raises(UserError) as raised:
        Simulation(
            make_model(), nn.functional.mse_loss, ALL_OPTIMIZERS["adamw"], workers=4, **given
        )
    assert message in str(raised.value)


def test_ranks_compare_their_wires() -> None:
    """A rank with another format is named before anything is sent."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = ALL_OPTIMIZERS["sgd"](model.parameters())
        wire = "modulo(bits=4)" if group.rank() == 2 else "modulo(bits=8)"
        with pytest.raises(UserError, match=r"but wire is modulo\(bits=8\) on rank 0"):
            decentralize(model, optimizer, "ring", process_group=group, wire=wire)

    run_ranks(4, body)
