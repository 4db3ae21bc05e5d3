"""Properties of the whole catalogue, then facts of single graphs and schedules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import UserError
from gossamer.topology import (
    Round,
    Schedule,
    ada,
    aer,
    aer_on_nodes,
    base_graph,
    complete,
    cycle,
    erdos_renyi,
    exponential,
    from_matrix,
    from_networkx,
    hypercube,
    lattice,
    od_equidyn,
    one_peer_exponential,
    one_peer_hypercube,
    one_peer_ring,
    ou_equidyn,
    parse,
    random_matching,
    random_regular,
    ring,
    star,
    static,
    torus,
)
from gossamer.topology.graphs import _decode_pairs
from gossamer.topology.weights import metropolis, uniform
from tests.catalogue import ALL_TOPOLOGIES, VARIANTS, product, sizes_of


def edges(round: Round) -> set[tuple[int, int]]:
    receivers, senders = round.matrix().nonzero()
    return {(int(r), int(s)) for r, s in zip(receivers, senders, strict=True) if r != s}


@pytest.mark.parametrize("text", ALL_TOPOLOGIES + VARIANTS)
@settings(max_examples=25)
@given(data=st.data(), step=st.integers(0, 400))
def test_every_round_is_doubly_stochastic_and_mixes(
    text: str, data: st.DataObject, step: int
) -> None:
    """Rows and columns sum to one, the mean is conserved, symmetric rounds never add error."""
    num_workers = data.draw(sizes_of(text))
    round = parse(text, num_workers).round(step)
    weights = round.matrix()
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-12)
    assert weights.min() >= 0
    x = np.random.default_rng(step).standard_normal((num_workers, 3))
    y = weights.toarray() @ x
    np.testing.assert_allclose(y.mean(axis=0), x.mean(axis=0), atol=1e-12)
    if round.symmetric:
        before = np.linalg.norm(x - x.mean(axis=0), axis=0)
        after = np.linalg.norm(y - y.mean(axis=0), axis=0)
        assert np.all(after <= before + 1e-12)


@pytest.mark.parametrize("text", ALL_TOPOLOGIES + VARIANTS)
@settings(max_examples=10)
@given(data=st.data(), step=st.integers(0, 50))
def test_neighbours_agree_with_the_matrix(text: str, data: st.DataObject, step: int) -> None:
    """Every send of one worker is a receive of another, with the same weight."""
    num_workers = data.draw(sizes_of(text))
    round = parse(text, num_workers).round(step)
    rebuilt = np.zeros((num_workers, num_workers))
    for worker in range(num_workers):
        part = round.neighbours(worker)
        rebuilt[worker, worker] = part.self_weight
        rebuilt[worker, part.receives.workers] = part.receives.weights
        sent = round.matrix().toarray()[part.sends.workers, worker]
        np.testing.assert_array_equal(part.sends.weights, sent)
    np.testing.assert_array_equal(rebuilt, round.matrix().toarray())


@pytest.mark.parametrize("text", ALL_TOPOLOGIES + VARIANTS)
@settings(max_examples=10)
@given(data=st.data())
def test_groups_describe_the_round_they_come_from(text: str, data: st.DataObject) -> None:
    """Where a round has groups, averaging within them is the round; they cover each worker once."""
    num_workers = data.draw(sizes_of(text))
    round = parse(text, num_workers).round(0)
    groups = round.groups()
    if groups is None:
        return
    expected = np.zeros((num_workers, num_workers))
    for group in groups:
        expected[np.ix_(group, group)] = 1 / len(group)
    np.testing.assert_allclose(round.matrix().toarray(), expected, atol=1e-12)
    assert sorted(np.concatenate(groups).tolist()) == list(range(num_workers))


@pytest.mark.parametrize("text", ALL_TOPOLOGIES + VARIANTS)
@settings(max_examples=10)
@given(data=st.data(), step=st.integers(0, 50))
def test_what_is_sent_follows_from_the_matrix(text: str, data: st.DataObject, step: int) -> None:
    """Equal rows of three or more that are even all-reduce, in a ring; every other edge is sent."""
    num_workers = data.draw(sizes_of(text))
    round = parse(text, num_workers).round(step)
    w = round.matrix().toarray()
    hears = [frozenset(np.flatnonzero(row).tolist()) for row in w]
    even = all(np.ptp(row[row > 0]) < 1e-12 for row in w)
    grouped = even and all(hears[j] == hears[i] for i in range(num_workers) for j in hears[i])
    reduced = {group for group in hears if grouped and len(group) > 2}
    sent = {(i, j) for i, j in edges(round) if not any(i in group for group in reduced)}
    messages, copies = np.zeros(num_workers), np.zeros(num_workers)
    for _, sender in sent:
        messages[sender] += 1
        copies[sender] += 1
    for group in reduced:
        messages[[*group]] = (len(group) - 1) + (len(group) - 1)  # to add up, and to hand out
        copies[[*group]] = messages[[*group]] / len(group)
    assert {frozenset(group.tolist()) for group in round.reduced_groups()} == reduced
    assert {(int(r), int(s)) for r, s in zip(*round.messages(), strict=True)} == sent
    assert round.reduces.tolist() == [any(i in g for g in reduced) for i in range(num_workers)]
    assert round.messages_sent.tolist() == messages.tolist()
    np.testing.assert_allclose(round.copies_sent, copies, rtol=1e-12)


@pytest.mark.parametrize("text", ALL_TOPOLOGIES + VARIANTS)
@settings(max_examples=10)
@given(data=st.data())
def test_rounds_repeat_after_the_period(text: str, data: st.DataObject) -> None:
    """The period is a promise: transports and models unroll a schedule that far and no further."""
    num_workers = data.draw(sizes_of(text))
    schedule = parse(text, num_workers)
    again = parse(text, num_workers)
    for step in range(3):
        assert schedule.round(step) == again.round(step)
        if schedule.period is not None:
            assert schedule.round(step) == schedule.round(step + schedule.period)


def test_numpy_integers_count_workers_too() -> None:
    """Sizes often come out of arrays."""
    for text in ALL_TOPOLOGIES:
        size: Any = np.int64(16)
        assert parse(text, size).round(0) == parse(text, 16).round(0)


@pytest.mark.parametrize("text", ALL_TOPOLOGIES + VARIANTS)
def test_one_worker_is_a_valid_world(text: str) -> None:
    """On one worker every topology is the identity, and sends nothing."""
    round = parse(text, 1).round(0)
    assert round.matrix().toarray().tolist() == [[1.0]]
    assert round.degree == 0
    assert round.copies_sent.tolist() == [0]


@pytest.mark.parametrize("text", ALL_TOPOLOGIES)
@pytest.mark.parametrize("num_workers", [0, -3, 8.0])
def test_no_worker_is_refused(text: str, num_workers: int) -> None:
    """Zero workers is an error that says so, for every topology."""
    with pytest.raises(UserError, match="at least one worker, got"):
        parse(text, num_workers)


@pytest.mark.parametrize(
    ("round", "degree"),
    [
        (ring(2), 1),
        (ring(3), 2),
        (ring(9), 2),
        (torus(4), 2),
        (torus(6), 3),
        (torus(10), 3),
        (torus(12), 4),
        (lattice(9, 4), 4),
        (exponential(2), 1),
        (exponential(16), 4),
        (exponential(17), 5),
        (hypercube(16), 4),
        (complete(7), 6),
        (star(7), 6),
        (random_regular(12, 5), 5),
    ],
)
def test_degrees(round: Round, degree: int) -> None:
    """Degrees are those of the definition; two-worker rings and 2 x m tori merge double edges."""
    assert round.degree == degree


def test_regular_graphs_weigh_uniformly_and_irregular_ones_by_metropolis() -> None:
    """The default rule gives 1/(k + 1) on a torus and 1/(1 + max degree) on a star."""
    assert set(torus(12).matrix().data) == {0.2}
    weights = star(5).matrix().toarray()
    np.testing.assert_allclose(weights[0], 0.2)
    np.testing.assert_allclose(np.diag(weights)[1:], 0.8)


def test_weights_on_request() -> None:
    """Either rule on any graph: uniform on a star declares that it does not conserve the mean."""
    np.testing.assert_allclose(ring(5, weights=metropolis).matrix().data, 1 / 3, rtol=1e-15)
    heavy = star(5, weights=uniform)
    assert not heavy.conserves_mean
    assert heavy.neighbours(1).self_weight == 0.5
    with pytest.raises(UserError, match="undirected"):
        exponential(5, weights=metropolis)


def test_torus_is_as_square_as_it_can_be() -> None:
    """Twelve workers form 3 x 4: worker 0 hears its row (1, 3) and its column (4, 8)."""
    assert torus(12).neighbours(0).receives.workers.tolist() == [1, 3, 4, 8]


def test_exponential_hears_powers_of_two_ahead() -> None:
    """Worker i ← i + 2^j (mod n), as many as ⌊log2(n − 1)⌋ + 1."""
    assert exponential(10).neighbours(7).receives.workers.tolist() == [1, 5, 8, 9]


@given(codes=st.lists(st.integers(0, 5_000_000_000), min_size=1, max_size=20))
def test_pair_codes_decode_to_distinct_pairs(codes: list[int]) -> None:
    """Code h(h − 1)/2 + l stands for the pair l < h, also where floating point rounds the root."""
    low, high = _decode_pairs(np.array(codes))
    assert np.all((low >= 0) & (low < high))
    assert (high * (high - 1) // 2 + low).tolist() == codes


def test_erdos_renyi_links_about_p_of_the_pairs() -> None:
    """The share of linked pairs is p, within five standard deviations."""
    n, p = 300, 0.2
    num_pairs = n * (n - 1) / 2
    linked = len(edges(erdos_renyi(n, p, seed=1))) / 2 / num_pairs
    assert abs(linked - p) < 5 * math.sqrt(p * (1 - p) / num_pairs)


def test_random_graphs_depend_on_their_seed_alone() -> None:
    """The same seed gives the same graph, another seed another one."""
    assert erdos_renyi(30, 0.3, seed=1) == erdos_renyi(30, 0.3, seed=1)
    assert erdos_renyi(30, 0.3, seed=1) != erdos_renyi(30, 0.3, seed=2)
    assert random_regular(30, 4, seed=1) == random_regular(30, 4, seed=1)
    assert random_regular(30, 4, seed=1) != random_regular(30, 4, seed=2)


def test_networkx_graphs_keep_their_nodes_in_order() -> None:
    """Undirected edges go both ways; a directed edge u → v means that v receives from u."""
    path = nx.Graph([("a", "b"), ("b", "c")])
    assert edges(from_networkx(path)) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    circle = nx.DiGraph([(0, 1), (1, 2), (2, 0)])
    assert edges(from_networkx(circle)) == {(1, 0), (2, 1), (0, 2)}
    assert from_networkx(nx.cycle_graph(7)) == ring(7)


def test_a_self_loop_of_a_networkx_graph_changes_nothing() -> None:
    """A worker always keeps a weight on itself; a loop does not double it."""
    graph = nx.cycle_graph(5)
    graph.add_edge(0, 0)
    assert from_networkx(graph) == ring(5)


@pytest.mark.parametrize("num_workers", [2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("pairs", [False, True])
def test_one_peer_exponential_is_exact_after_log2_n(num_workers: int, pairs: bool) -> None:
    """For n = 2^m the product of m rounds is the exact average, and of fewer it is not."""
    schedule = one_peer_exponential(num_workers, pairs=pairs)
    num_rounds = int(math.log2(num_workers))
    assert schedule.period == num_rounds
    average = np.full((num_workers, num_workers), 1 / num_workers)
    np.testing.assert_allclose(product(schedule, num_rounds), average, atol=1e-15)
    if num_rounds > 1:
        assert np.abs(product(schedule, num_rounds - 1) - average).max() > 1e-3
    assert all(schedule.round(t).symmetric for t in range(num_rounds)) or not pairs


def test_pairs_of_one_peer_exponential_are_the_hypercube() -> None:
    """Pairs at distance 2^t within blocks are pairs that differ in bit t."""
    for step in range(4):
        pairs = one_peer_exponential(16, pairs=True).round(step)
        assert pairs == one_peer_hypercube(16).round(step)
        assert edges(pairs) == {(i, i ^ 2**step) for i in range(16)}


@pytest.mark.parametrize(("num_workers", "period"), [(1, 1), (2, 2), (6, 2), (5, 5), (7, 7)])
def test_one_peer_ring_visits_every_edge_of_the_ring(num_workers: int, period: int) -> None:
    """Even rings alternate two matchings; on odd ones each worker is idle once in a period."""
    schedule = one_peer_ring(num_workers)
    assert schedule.period == period
    rounds = [schedule.round(step) for step in range(period)]
    assert set().union(*map(edges, rounds)) == edges(ring(num_workers))
    assert all(round.degree <= 1 for round in rounds)
    rests = sum(round.in_degrees == 0 for round in rounds)
    assert np.all(rests == num_workers % 2)


@pytest.mark.parametrize(
    ("node_of", "words"),
    [
        ([], "a node index for each worker"),
        ([0, 0, -1, 1], "a node index for each worker"),
        ([0.4, 0.9], "a node index for each worker"),
        ("abc", "a node index for each worker"),
        ([0, 0, 2, 2], "number nodes without gaps"),
        ([0, 0, 0, 1], "nodes of 1 to 3"),
    ],
)
def test_aer_needs_nodes_that_can_be_paired(node_of: Any, words: str) -> None:
    """Nodes are numbered from 0 without gaps and hold the same number of workers."""
    with pytest.raises(UserError, match=words):
        aer_on_nodes(node_of)


@pytest.mark.parametrize(("nodes", "size"), [(2, 4), (4, 4), (8, 4), (2, 8), (4, 8), (8, 8)])
def test_aer_is_exact_after_one_period(nodes: int, size: int) -> None:
    """2·log2 M rounds give the exact average on M nodes."""
    schedule = aer(nodes * size, workers_per_node=size)
    num_rounds = 2 * int(math.log2(nodes))
    assert schedule.period == num_rounds
    np.testing.assert_allclose(product(schedule, num_rounds), 1 / (nodes * size), atol=1e-15)


def test_aer_alternates_which_half_of_the_pairs_leaves_its_node() -> None:
    """Four nodes of two: the first pair of nodes averages across, then the second."""

    def groups(step: int) -> list[list[int]]:
        found = aer(8, workers_per_node=2).round(step).groups()
        assert found is not None
        return [group.tolist() for group in found]

    assert groups(0) == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert groups(1) == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert groups(2) == [[0, 1, 4, 5], [2, 3], [6, 7]]
    assert groups(3) == [[0, 1], [2, 3, 6, 7], [4, 5]]


def test_aer_takes_any_mapping_from_worker_to_node() -> None:
    """Workers dealt round-robin onto nodes give the same rounds, with the workers renamed."""
    dealt = aer_on_nodes([0, 1, 2, 3, 0, 1, 2, 3])
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    for step in range(4):
        renamed = dealt.round(step).matrix().toarray()[np.ix_(order, order)]
        expected = aer(8, workers_per_node=2).round(step).matrix().toarray()
        np.testing.assert_array_equal(renamed, expected)


@pytest.mark.parametrize("num_workers", range(2, 65))
def test_base_graph_is_exact_on_any_number_of_workers(num_workers: int) -> None:
    """Degree <= k in every round, at most 2·log_{k+1} n + 2 rounds, and the exact average."""
    for k in range(1, min(4, num_workers - 1) + 1):
        schedule = base_graph(num_workers, k)
        assert schedule.period is not None
        assert schedule.period <= 2 * math.log(num_workers, k + 1) + 2 + 1e-9
        assert max(schedule.round(step).degree for step in range(schedule.period)) <= k
        exact = product(schedule, schedule.period)
        np.testing.assert_allclose(exact, 1 / num_workers, atol=1e-14)


@pytest.mark.parametrize(("num_workers", "k"), [(5, 1), (33, 1), (26, 2), (1000, 1)])
def test_base_graph_leaves_few_workers_idle(num_workers: int, k: int) -> None:
    """Those without a peer across blocks average inside: at most one per block is idle."""
    schedule = base_graph(num_workers, k)
    for step in range(schedule.period or 0):
        resting = int((schedule.round(step).in_degrees == 0).sum())
        assert resting <= math.log2(num_workers)


def test_base_graph_takes_the_shorter_of_its_two_constructions() -> None:
    """Six workers: three pairs' worth of three workers, then one round across: 4, not 5."""
    assert base_graph(6, k=1).period == 4
    assert base_graph(5, k=1).period == 5
    assert base_graph(7, k=6).period == 1


@pytest.mark.parametrize("num_workers", [2, 5, 16, 33])
def test_od_equidyn_contracts_by_its_rate_in_expectation(num_workers: int) -> None:
    """With η = ½ the mean of ‖Wx − x̄‖² over all distances is (n − 1)/(2n) of ‖x − x̄‖².

    And distances are drawn evenly: each as often as chance allows, within five deviations.
    """
    n, num_draws = num_workers, 40 * num_workers
    schedule = od_equidyn(n)
    drawn = Counter(schedule.round(step) for step in range(num_draws))
    x = np.random.default_rng(0).standard_normal(n)
    before = np.sum((x - x.mean()) ** 2)
    after = np.mean([np.sum((r.matrix().toarray() @ x - x.mean()) ** 2) for r in drawn])
    assert after / before == pytest.approx((n - 1) / (2 * n), rel=1e-12)
    expected = num_draws / (n - 1)
    assert len(drawn) == n - 1
    assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in drawn.values())


@pytest.mark.parametrize("build", [random_matching, od_equidyn, ou_equidyn])
def test_random_schedules_depend_on_seed_and_step_alone(build: Callable[..., Schedule]) -> None:
    """Another seed and another step give other rounds; the same ones, in any order, the same."""
    first, again, other = build(20, seed=1), build(20, seed=1), build(20, seed=2)
    assert [again.round(t) for t in (5, 0)] == [first.round(t) for t in (5, 0)]
    assert first.round(0) != first.round(1)
    assert first.round(0) != other.round(0)


def test_ou_equidyn_starts_pairing_anywhere() -> None:
    """On odd n one worker is idle, and over many rounds every worker has been."""
    schedule = ou_equidyn(7)
    resting = [np.flatnonzero(schedule.round(step).in_degrees == 0) for step in range(100)]
    assert set(np.concatenate(resting).tolist()) == set(range(7))


def test_ou_equidyn_pairs_at_one_distance() -> None:
    """Every round is symmetric, and all of its pairs lie at the same distance."""
    schedule = ou_equidyn(11, seed=2)
    for step in range(30):
        round = schedule.round(step)
        assert round.symmetric
        assert round.degree == 1
        assert len({min((r - s) % 11, (s - r) % 11) for r, s in edges(round)}) == 1


@pytest.mark.parametrize(
    ("num_workers", "k0", "gamma", "degrees"),
    [
        (96, 10, 0.02, {0: 10, 49: 10, 50: 8, 149: 8, 150: 6, 399: 2, 400: 2, 10_000: 2}),
        (1008, 112, 1.0, {0: 112, 1: 110, 2: 110, 3: 108, 110: 2, 111: 2, 300: 2}),
        (8, 7, 1.0, {0: 7, 1: 6, 2: 4, 5: 2}),
        (16, 15, 1.0, {0: 15, 1: 14, 2: 12}),
        (7, 6, 1.0, {0: 6, 1: 4, 3: 2}),
        (6, 100, 10.0, {0: 5, 9: 5, 10: 2}),
    ],
)
def test_ada_thins_the_lattice_by_epoch(
    num_workers: int, k0: int, gamma: float, degrees: dict[int, int]
) -> None:
    """k(epoch) = max(k0 − int(γ·epoch), 2), floored to even; k >= n − 1 is the complete graph."""
    schedule = ada(num_workers, k0=k0, gamma=gamma, steps_per_epoch=3)
    for epoch, k in degrees.items():
        for step in (3 * epoch, 3 * epoch + 2):
            expected = complete(num_workers) if k >= num_workers - 1 else lattice(num_workers, k)
            assert schedule.round(step) == expected


def test_a_static_schedule_must_be_connected() -> None:
    """A graph that leaves workers unreachable never reaches consensus, so it is refused."""
    matching = one_peer_ring(6).round(0)
    one_way = from_matrix([[1.0, 0.0], [0.5, 0.5]], doubly_stochastic=False)
    for unreachable in (matching, one_way):
        with pytest.raises(UserError, match="connected"):
            static(unreachable)
    assert cycle([matching, one_peer_ring(6).round(1)]).period == 2


def test_a_schedule_of_ones_own_is_checked() -> None:
    """A period of no rounds, or a round on other workers, is refused with the step."""
    with pytest.raises(UserError, match="at least one round, got 0"):
        Schedule(4, 0, lambda step: ring(4))
    with pytest.raises(UserError, match="must be on 5 workers, got one on 4 at step 0"):
        Schedule(5, 2, lambda step: ring(4)).round(0)


def test_steps_count_from_zero() -> None:
    """A negative step is a mistake, not a round counted from the end."""
    with pytest.raises(UserError, match="from 0, got -1"):
        static(ring(4)).round(-1)


@pytest.mark.parametrize(
    ("text", "num_workers", "words"),
    [
        ("lattice(k=3)", 16, "even k, at least 2 and less than its 16 workers, got k=3; use k=4"),
        ("lattice(k=16)", 16, "less than its 16 workers, got k=16; use k=14"),
        ("lattice(k=0)", 16, "got k=0; use ring or complete"),
        ("lattice(k=2)", 2, "got k=2; use ring or complete"),
        ("torus", 13, "got the prime 13; use 14 workers, or ring"),
        ("torus", 2, "got the prime 2; use 4 workers"),
        ("hypercube", 12, "power-of-two number of workers, got 12; use 8 or 16"),
        ("one_peer_hypercube", 12, "power-of-two"),
        ("one_peer_exponential(pairs=true)", 12, "power-of-two"),
        ("aer(workers_per_node=4)", 12, "power-of-two number of nodes, got 3 nodes of 4"),
        (
            "aer(workers_per_node=4)",
            18,
            "full nodes, got 18 workers for nodes of 4; set workers_per_node to a divisor",
        ),
        ("aer(workers_per_node=0)", 16, "workers_per_node of at least 1, got 0"),
        ("erdos_renyi(p=1.5)", 8, r"p in \[0, 1\], got p=1.5"),
        ("erdos_renyi(p=0.001)", 64, r"use p well above ln\(n\)/n = 0.065"),
        ("random_regular(k=3)", 7, r"even number of edge ends 7\*k, got k=3; use k=2"),
        ("random_regular(k=8)", 8, r"k in 1\.\.7 .* got k=8; use k=7"),
        ("random_regular(k=1)", 8, "use k >= 3"),
        ("base_graph(k=0)", 8, "base_graph needs k of at least 1, got 0"),
        ("od_equidyn(eta=0)", 8, "0 < eta <= 1, got eta=0"),
        ("ada(k0=1, gamma=1, steps_per_epoch=1)", 8, "k0 >= 2 and a finite gamma >= 0, got k0=1"),
        ("ada(k0=4, gamma=-1, steps_per_epoch=1)", 8, "gamma >= 0"),
        ("ada(k0=4, gamma=1e400, steps_per_epoch=1)", 8, "finite gamma .* got k0=4, gamma=inf"),
        ("random_matching(seed=-1)", 8, "seed must be at least 0, got -1"),
        ("od_equidyn(seed=-1)", 8, "seed must be at least 0, got -1"),
        ("erdos_renyi(p=0.5, seed=-1)", 8, "seed must be at least 0, got -1"),
        ("random_regular(k=3, seed=-1)", 8, "seed must be at least 0, got -1"),
        ("ada(k0=4, gamma=1, steps_per_epoch=0)", 8, "steps_per_epoch of at least 1, got 0"),
    ],
)
def test_impossible_topologies_explain_themselves(text: str, num_workers: int, words: str) -> None:
    """Errors come when a topology is built, with what was required, given and to do."""
    with pytest.raises(UserError, match=words):
        parse(text, num_workers)
