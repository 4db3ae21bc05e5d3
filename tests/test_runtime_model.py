"""The runtime model: the recursion, costs of rounds, profiles, and the sources of a saving."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import UserError
from gossamer.runtime_model import Job, Profile, build, predict, read_profile, write_profile
from gossamer.runtime_model import closed_forms as closed
from gossamer.runtime_model.costs import Links, all_reduce, everyone, mix
from gossamer.runtime_model.factors import split_saving
from gossamer.runtime_model.methods import gossip
from gossamer.runtime_model.model import (
    Compute,
    ExchangeTime,
    Order,
    TimedMethod,
    Trials,
    after_update,
    bucket_wise,
    gamma,
    in_backward,
    resampled,
    timeline,
    whole_step,
)
from gossamer.runtime_model.presets import GPUS, LINKS, bucket_sizes, from_data_sheet
from gossamer.runtime_model.profile import Bucket, Link, Network
from gossamer.topology import parse, spaced

FORMS: list[tuple[Order, Callable[..., float]]] = [
    (bucket_wise, closed.bucket_wise_s),
    (whole_step, closed.whole_step_s),
    (after_update, closed.after_update_s),
    (in_backward, closed.in_backward_s),
]
QUARTERS = st.integers(1, 16).map(lambda quarters: quarters / 4)
"""Equal or clearly apart: a wire that is hardly the limit takes many iterations to become it."""

VARYING = Trials(draw=gamma(0.0134), num_trials=8, iterations=60, warmup=20)


def equal_buckets(
    order: Order, f: float, b: int, backward: float, theta: float, c: float
) -> TimedMethod:
    compute = Compute(forward_s=f, backward_s=(backward,) * b, update_s=(theta,) * b)
    exchange = ExchangeTime(everyone, np.full((4, b), c))
    return TimedMethod(order, compute, 4, lambda step: exchange)


def flat_links(num_workers: int, bits_s: float = 8.0) -> Links:
    """Links on which a byte takes a second, without nodes."""
    return Links(
        node_of=np.arange(num_workers),
        port_bits_s=np.full(num_workers, bits_s),
        uplink_bits_s=np.full(num_workers, np.inf),
    )


def small_profile(**changes: object) -> Profile:
    buckets = (
        Bucket(num_bytes=1_000_000, backward_s=0.02, update_s=0.002),
        Bucket(num_bytes=3_000_000, backward_s=0.06, update_s=0.006),
    )
    network = Network(
        workers_per_node=2,
        inside=Link(bits_s=10e9),
        between=Link(bits_s=1e9, latency_s=1e-4),
    )
    profile = Profile(name="test", workers=4, forward_s=0.04, buckets=buckets, network=network)
    return profile.replace(**changes)


@pytest.mark.parametrize(("order", "form"), FORMS, ids=lambda each: each.__name__)
@settings(max_examples=25, deadline=None)
@given(f=QUARTERS, b=st.integers(1, 6), backward=QUARTERS, theta=QUARTERS, c=QUARTERS)
def test_closed_forms_are_what_the_recursion_comes_to(
    order: Order,
    form: Callable[..., float],
    f: float,
    b: int,
    backward: float,
    theta: float,
    c: float,
) -> None:
    """Without variance and with equal buckets the recursion gives the closed form to 1e-9."""
    method = equal_buckets(order, f, b, backward, theta, c)
    predicted = predict(method, Trials(iterations=12, warmup=160))
    expected = form(f=f, b=b, B=backward, theta=theta, c=c)
    assert predicted.mean_s == pytest.approx(expected, rel=1e-9)
    assert predicted.exposed_s == pytest.approx(expected - method.compute.total_s, abs=1e-7)


def test_bucket_wise_is_never_slower_than_the_whole_step() -> None:
    """With equal times the link is idle least if buckets are sent one by one."""
    for c in (0.1, 0.5, 1.0, 3.0):
        step, wise = (
            predict(equal_buckets(order, 1.0, 4, 0.5, 0.2, c)).mean_s
            for order in (whole_step, bucket_wise)
        )
        assert wise <= step + 1e-12


def test_waiting_grows_with_variance_and_overlap_tolerates_it() -> None:
    """Varying compute times cost an all-reduce more than an overlapped exchange."""

    def excess(order: Order) -> float:
        method = equal_buckets(order, 1.0, 4, 0.5, 0.05, 0.01)
        return predict(method, VARYING).mean_s / predict(method).mean_s - 1

    assert excess(in_backward) > excess(whole_step) > 0


def test_a_worker_waits_only_for_those_it_meets() -> None:
    """Pairs that never change wait less than all together."""
    compute = Compute(forward_s=1.0, backward_s=(1.0,), update_s=(0.0,))
    schedule = parse("one_peer_hypercube", 8)
    pairs = mix(flat_links(8), schedule.round(0), [1])
    pairs = ExchangeTime(pairs.meet, np.zeros((8, 1)))
    all_eight = ExchangeTime(everyone, np.zeros((8, 1)))
    times = [
        predict(TimedMethod(after_update, compute, 8, lambda step, e=each: e), VARYING).mean_s
        for each in (pairs, all_eight)
    ]
    assert 2.0 < times[0] < times[1]


def test_costs_are_bytes_over_the_busiest_link() -> None:
    """A pair costs one copy, a ring of neighbours two, a group of g 2(g − 1)/g."""
    links = flat_links(8)
    for topology, copies in (("one_peer_ring", 1.0), ("ring", 2.0), ("complete", 2 * 7 / 8)):
        cost = mix(links, parse(topology, 8).round(0), [10, 20]).cost_WK
        np.testing.assert_allclose(cost, np.tile([10 * copies, 20 * copies], (8, 1)))
    np.testing.assert_allclose(all_reduce(links, [8]).cost_WK, 14.0)


def test_workers_of_a_node_share_its_link() -> None:
    """Pairs across nodes share the uplink, pairs inside do not touch it."""
    network = Network(workers_per_node=4, inside=Link(bits_s=800.0), between=Link(bits_s=8.0))
    links = Links.of(network, 8)
    hypercube = parse("one_peer_hypercube", 8)
    inside, across = (mix(links, hypercube.round(t), [1]).cost_WK.max() for t in (0, 2))
    assert (inside, across) == pytest.approx((0.01, 4.0))
    aer = parse("aer(workers_per_node=4)", 8)
    both, apart = (mix(links, aer.round(t), [1]).cost_WK.max() for t in (0, 1))
    assert (both, apart) == pytest.approx((2 * 7 / 8, 2 * 3 / 4 / 100))


def test_a_slow_link_slows_those_who_use_it() -> None:
    """Rates may differ by worker: a pair has the rate of the slower one."""
    links = flat_links(4)
    links.port_bits_s[3] = 1.0
    cost = mix(links, parse("one_peer_ring", 4).round(0), [1]).cost_WK[:, 0]
    assert cost.tolist() == [1.0, 1.0, 8.0, 8.0]


def test_a_worker_waits_for_its_sends() -> None:
    """In a directed round a worker starts when the peer that it sends to is ready too."""
    exchange = mix(flat_links(8), parse("one_peer_exponential", 8).round(0), [1])
    late = np.zeros((1, 8))
    late[0, 5] = 1.0
    # Worker i receives from i + 1: 4 receives from 5, and 6 sends to it.
    assert np.flatnonzero(exchange.meet(late)[0]).tolist() == [4, 5, 6]


def test_pairs_exchange_beside_groups_that_reduce() -> None:
    """In a round of AER on nodes of two, four workers all-reduce while pairs send one message."""
    links = replace(flat_links(8), reduce_efficiency=0.5)
    round = parse("aer(workers_per_node=2)", 8).round(0)
    sizes = {len(group): group for group in round.groups() or ()}
    cost = mix(links, round, [1]).cost_WK[:, 0]
    np.testing.assert_allclose(cost[sizes[2]], 8 / links.port_bits_s[0])
    np.testing.assert_allclose(cost[sizes[4]], 8 * 2 * 3 / 4 / 0.5 / links.port_bits_s[0])


def test_passes_over_parameters_follow_the_round() -> None:
    """One per message, two for an all-reduce, none where nothing is sent."""
    job = Job.of(small_profile().replace(mix_s=1.0), 8)
    alone_s = gossip(job, schedule=spaced(parse("ring", 8), 1000)).compute.total_s
    for topology, passes in {
        "one_peer_ring": 1,
        "ring": 2,
        "exponential": 3,
        "complete": 2,
    }.items():
        assert build(topology, job).compute.total_s == pytest.approx(alone_s + passes, abs=0.01)


def test_a_graph_that_thins_out_is_modelled_over_the_whole_run() -> None:
    """Ada's first steps are its most expensive; a run also has later ones."""
    job = Job.of(small_profile(), 16)
    schedule = parse("ada(k0=12, gamma=1, steps_per_epoch=96)", 16)
    first, whole = (
        predict(gossip(job, schedule=schedule, num_steps=steps)).mean_s for steps in (96, 960)
    )
    ring_s = predict(build("ring", job)).mean_s
    assert ring_s < whole < first


@pytest.mark.parametrize(
    ("algorithm", "workers", "seconds"),
    [
        ("ring", 8, 2 * 7 / 8),
        ("hierarchical", 8, 2 * 3 / 4 / 100 + 2 * 1 / 2),
        ("hierarchical", 16, 2 * 3 / 4 / 100 + 2 * 3 / 4),
        ("hierarchical", 6, 2 * 5 / 6),  # one node is not full: in one ring
    ],
)
def test_stages_spare_the_links_between_nodes(algorithm: str, workers: int, seconds: float) -> None:
    """In one ring a node's link carries 2(n − 1)/n of the bytes, in stages 2(M − 1)/M."""
    network = Network.model_validate(
        {
            "workers_per_node": 4,
            "inside": {"bits_s": 800.0},
            "between": {"bits_s": 8.0},
            "all_reduce": algorithm,
        }
    )
    cost = all_reduce(Links.of(network, workers), [1]).cost_WK
    np.testing.assert_allclose(cost, seconds)


def test_the_timeline_holds_every_task_in_order() -> None:
    """A worker's F, B and U do not overlap, and each bucket's C follows its U."""
    events = timeline(equal_buckets(bucket_wise, 1.0, 2, 0.5, 0.2, 0.3), iterations=2)
    own = [event for event in events if event.worker == 0]
    busy = sorted((e.start_s, e.end_s) for e in own if e.task != "C")
    assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(busy))
    assert [e.task for e in own if e.iteration == 0] == ["F", "B", "U", "C", "B", "U", "C"]
    updates = {(e.iteration, e.bucket): e.end_s for e in own if e.task == "U"}
    assert all(e.start_s >= updates[e.iteration, e.bucket] for e in own if e.task == "C")


def test_factors_have_mean_one_and_the_variance_asked_for() -> None:
    """Both distributions of compute times are normalized."""
    rng = np.random.default_rng(0)
    drawn = gamma(0.0134)(rng, (200, 200))
    assert drawn.mean() == pytest.approx(1, abs=2e-3)
    assert drawn.var() == pytest.approx(0.0134, rel=0.05)
    assert resampled([1.0, 3.0])(rng, (50, 50)).mean() == pytest.approx(1, abs=0.05)
    with pytest.raises(UserError, match="must not be negative"):
        gamma(-1.0)


@pytest.mark.parametrize("topology", ["ring", "aer", "one_peer_exponential"])
def test_three_factors_add_up_to_the_saving(topology: str) -> None:
    """The parts of overlap, links and tolerance add up to the difference to DDP."""
    job = Job.of(small_profile(variance=0.0134), 8)
    split = split_saving(job, build(topology, job), job.trials(4))
    total = split.overlap_s + split.links_s + split.tolerance_s
    assert total == pytest.approx(split.ddp_s - split.method_s, abs=1e-12)
    assert split.ddp_s == pytest.approx(predict(build("ddp", job), job.trials(4)).mean_s)


def test_factors_that_cannot_help_do_not() -> None:
    """Without variance tolerance saves nothing; the complete graph changes no link cost."""
    job = Job.of(small_profile(), 8)
    split = split_saving(job, build("complete", job))
    assert split.tolerance_s == pytest.approx(0, abs=1e-12)
    assert split.links_s == pytest.approx(0, abs=1e-12)
    assert split.overlap_s > 0


def test_local_steps_pay_the_all_reduce_once_in_a_period() -> None:
    """PostLocalSGD's exposed time is a quarter of an all-reduce with a period of four."""
    job = Job.of(small_profile(), 4)
    reduce_s = all_reduce(job.links, job.bucket_bytes).cost_WK[0].sum()
    predicted = predict(build("post_local_sgd(h=4)", job))
    assert predicted.exposed_s == pytest.approx(reduce_s / 4)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    """What is written is read back, and nothing else is left in the folder."""
    profile = small_profile(variance=0.01, factors=(0.9, 1.1), environment={"date": "today"})
    write_profile(profile, tmp_path / "job" / "profile.json")
    assert read_profile(tmp_path / "job" / "profile.json") == profile
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"forward_s"', '"forwards"', "forward"),
        ('"bits_s": 1000000000.0', '"bits_s": -1', "network.between.bits_s"),
        ('"schema_version": 1', '"schema_version": 2', "schema_version"),
        ("{", "", "Invalid JSON"),
    ],
)
def test_a_wrong_profile_is_refused_by_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    """The message names the field and what to do."""
    path = tmp_path / "profile.json"
    write_profile(small_profile(), path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=said):
        read_profile(path)


def test_a_missing_profile_says_how_to_write_one(tmp_path: Path) -> None:
    """A path that does not exist is the user's to correct."""
    with pytest.raises(UserError, match="gossamer profile"):
        read_profile(tmp_path / "none.json")


@pytest.mark.parametrize("gpu", GPUS)
def test_every_preset_makes_a_profile(gpu: str) -> None:
    """Data-sheet numbers are enough: buckets hold all bytes and compute time is flops over rate."""
    profile = from_data_sheet(
        gpu, "25gbit", parameters=65e6, flops=1e12, workers=8, workers_per_node=4, efficiency=0.5
    )
    assert profile.num_bytes == 260_000_000
    backward_s = sum(bucket.backward_s for bucket in profile.buckets)
    assert profile.forward_s + backward_s == pytest.approx(1e12 / (GPUS[gpu].flops * 0.5))
    assert profile.network.between == LINKS["25gbit"]


def test_an_unknown_preset_names_the_nearest() -> None:
    """A typing error in a GPU's name suggests the nearest name."""
    with pytest.raises(UserError, match="did you mean 'a100'"):
        from_data_sheet("a1000", "25gbit", parameters=1, flops=1, workers=1, workers_per_node=1)


def test_small_models_are_one_bucket() -> None:
    """DDP's first bucket is a megabyte, and the rest at most 25."""
    assert bucket_sizes(500_000) == [500_000]
    sizes = bucket_sizes(100_000_000)
    assert sum(sizes) == 100_000_000
    assert max(sizes) <= 25 * 1024**2
