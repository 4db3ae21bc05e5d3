from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import UserError
from gossamer.topology import (
    Round,
    complete,
    cycle,
    erdos_renyi,
    exponential,
    from_matrix,
    lattice,
    one_peer_ring,
    parse,
    ring,
    star,
    static,
    torus,
)
from gossamer.topology import spectrum as sp
from gossamer.topology.summary import summarize
from gossamer.topology.weights import uniform
from tests.catalogue import ALL_TOPOLOGIES, VARIANTS, product, sizes_of


@pytest.mark.parametrize(
    ("round", "p"),
    [
        (ring(16), 0.0989),
        (ring(32), 0.0255),
        (ring(64), 0.0064),
        (torus(16), 0.640),
        (torus(32), 0.221),
        (torus(64), 0.221),
        (exponential(16), 0.640),
        (exponential(32), 0.556),
        (exponential(64), 0.490),
        (complete(16), 1.0),
    ],
)
def test_p_equals_the_published_figures(round: Round, p: float) -> None:
    """The mixing parameters of Kong et al.'s graphs, to the digits they are given with."""
    assert sp.mixing_parameter(round) == pytest.approx(p, abs=6e-4 if p > 0.1 else 6e-5)


DECAY = {
    "one_peer_ring": [0.4667, 0.2, 0.1333, 0.1, 0.0792, 0.0646, 0.0536, 0.0451],
    "one_peer_exponential": [0.4667, 0.2, 0.0667, 0, 0, 0, 0, 0],
    "one_peer_exponential(pairs=true)": [0.4667, 0.2, 0.0667, 0, 0, 0, 0, 0],
    "aer(workers_per_node=4)": [0.1333, 0.0667, 0.0333, 0, 0, 0, 0, 0],
    "complete": [0, 0, 0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("text", DECAY)
def test_consensus_decay_equals_the_published_table(text: str) -> None:
    """E_t/E_0 on 16 workers as 4 x 4, the table of Wang et al., digit by digit."""
    np.testing.assert_allclose(sp.consensus_decay(parse(text, 16), 8), DECAY[text], atol=5.1e-5)


@pytest.mark.parametrize("text", ALL_TOPOLOGIES + VARIANTS)
@settings(max_examples=8)
@given(data=st.data())
def test_contraction_equals_its_definition(text: str, data: st.DataObject) -> None:
    """The fast methods give the dense norm of the product of rounds, for the whole catalogue."""
    schedule = parse(text, data.draw(sizes_of(text)))
    steps = min(schedule.period or 3, 12)
    deviation = product(schedule, steps) - 1 / schedule.num_workers
    norm = np.linalg.norm(deviation, ord=2)
    assert sp.contraction(schedule, steps) == pytest.approx(norm, abs=1e-12)


@pytest.mark.parametrize(
    "text",
    ["torus", "star", "one_peer_ring", "random_regular(k=3)", "base_graph(k=1)", "ou_equidyn"],
)
def test_large_topologies_give_what_small_ones_would(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanczos, and inversion where it stalls, agree with the dense answer to six digits."""
    schedule = parse(text, 120)
    expected = sp.contraction(schedule)
    monkeypatch.setattr(sp, "_DENSE_BELOW", 0)
    assert sp.contraction(schedule) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_long_thin_graph_does_not_stall() -> None:
    """At 6000 workers one-peer ring's eigenvalues cluster below 1; theory says 1 − (2π/n)²."""
    n = 6000
    left = sp.contraction(one_peer_ring(n))
    assert 1 - left**2 == pytest.approx((2 * np.pi / n) ** 2, rel=1e-3)


@pytest.mark.parametrize("text", ["ring", "torus", "one_peer_ring", "erdos_renyi(p=0.3)"])
def test_the_rate_of_a_schedule_is_p_of_a_static_one(text: str) -> None:
    """mixing_rate is per round: a static schedule's is its p, a repeated round changes nothing."""
    schedule = parse(text, 16)
    rounds = [schedule.round(step) for step in range(schedule.period or 1)]
    twice = cycle([round for round in rounds for _ in range(2)])
    if len(rounds) == 1:
        assert sp.mixing_rate(schedule) == pytest.approx(sp.mixing_parameter(rounds[0]))
        assert sp.mixing_rate(twice) == pytest.approx(sp.mixing_rate(schedule))
    assert 0 < sp.mixing_rate(twice) < 1


@pytest.mark.parametrize(
    ("text", "num_workers", "rounds"),
    [
        ("complete", 9, 1),
        ("ring", 3, 1),
        ("ring", 4, None),
        ("one_peer_exponential", 16, 4),
        ("one_peer_exponential", 12, None),
        ("aer(workers_per_node=4)", 32, 6),
        ("base_graph(k=1)", 13, 7),
        ("base_graph(k=2)", 1000, 12),
        ("erdos_renyi(p=0.9)", 40, None),
        ("random_matching", 16, None),
        ("ring", 1, 0),
    ],
)
def test_rounds_to_consensus(text: str, num_workers: int, rounds: int | None) -> None:
    """Exact where the product of rounds is the average; asymptotic however fast it shrinks."""
    assert sp.rounds_to_consensus(parse(text, num_workers)) == rounds


def test_a_late_exact_round_is_found_and_a_nearly_exact_one_is_not_exact() -> None:
    """Eleven rings and one complete graph: exact after twelve; 1e-11 short of the mean: never."""
    assert sp.rounds_to_consensus(cycle([ring(4)] * 11 + [complete(4)])) == 12
    nearly = (1 - 1e-11) * np.full((4, 4), 0.25) + 1e-11 * np.eye(4)
    assert sp.rounds_to_consensus(static(from_matrix(nearly))) is None


@pytest.mark.parametrize("steps", [0, -1])
def test_a_contraction_is_over_at_least_one_round(steps: int) -> None:
    """No rounds is not 'the period'."""
    with pytest.raises(UserError, match="at least one round"):
        sp.contraction(static(ring(8)), steps)


def test_a_static_directed_graph_can_be_exact() -> None:
    """De Bruijn's graph on 2^m workers averages exactly in m rounds, though it never changes."""
    n = 16
    weights = np.zeros((n, n))
    for worker in range(n):
        weights[worker, [2 * worker % n, (2 * worker + 1) % n]] = 0.5
    assert sp.rounds_to_consensus(static(from_matrix(weights))) == 4
    assert sp.spectral_gap(from_matrix(weights)) == pytest.approx(1.0, abs=1e-3)


def test_spectral_gap_of_normal_and_other_rounds() -> None:
    """The gap is 1 − |λ₂|, by Fourier, by the norm, or by eigenvalues; p is 1 − (1 − gap)²."""
    for round in (ring(12), torus(12), exponential(12), lattice(12, 4)):
        moduli = np.sort(np.abs(np.linalg.eigvals(round.matrix().toarray())))
        assert sp.spectral_gap(round) == pytest.approx(1 - moduli[-2])
        assert sp.mixing_parameter(round) == pytest.approx(1 - moduli[-2] ** 2)


def test_a_matching_does_not_mix_alone() -> None:
    """One round of pairs leaves some directions untouched: p = 0."""
    assert sp.mixing_parameter(one_peer_ring(8).round(0)) == pytest.approx(0, abs=1e-12)


def test_mixing_speed_needs_a_conserved_mean() -> None:
    """Uniform weights on a star move the mean, so p is refused with the remedy."""
    heavy = star(5, weights=uniform)
    with pytest.raises(UserError, match="use metropolis"):
        sp.mixing_parameter(heavy)
    with pytest.raises(UserError, match="use metropolis"):
        sp.rounds_to_consensus(static(heavy))


def test_decay_at_scale_is_an_average_over_random_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the dense limit 64 random starts estimate it; on 200 workers within 5 %."""
    schedule = static(erdos_renyi(200, 0.05))
    exact = sp.consensus_decay(schedule, 3)
    monkeypatch.setattr(sp, "_DENSE_BELOW", 0)
    np.testing.assert_allclose(sp.consensus_decay(schedule, 3), exact, rtol=0.05)


@pytest.mark.parametrize("text", ALL_TOPOLOGIES)
def test_summaries_at_scale(text: str) -> None:
    """Every entry can be summarized on about a thousand workers, with facts within their bounds."""
    try:
        schedule = parse(text, 1008)
    except UserError:
        schedule = parse(text, 1024)
    summary = summarize(schedule)
    assert 0 < summary.copies_sent <= summary.degree < schedule.num_workers
    assert summary.copies_sent <= summary.messages <= 2 * summary.degree
    assert summary.mixing_rate is not None
    assert 0 < summary.mixing_rate <= 1
    assert (summary.rounds_to_consensus is not None) <= (summary.mixing_rate == 1)


@pytest.mark.parametrize(
    ("text", "num_workers", "messages", "copies"),
    [
        ("ring", 16, 2, 2),
        ("star", 16, 15, 15),
        ("complete", 16, 30, 1.875),
        ("one_peer_ring", 5, 0.8, 0.8),  # each is idle once in five rounds
        ("aer(workers_per_node=4)", 16, 10, 1.625),  # half the time 2·7/8, half 2·3/4
    ],
)
def test_summaries_count_what_the_busiest_worker_sends(
    text: str, num_workers: int, messages: float, copies: float
) -> None:
    """Per round, on average over a period: not a mean of maxima that no worker sends."""
    summary = summarize(parse(text, num_workers))
    assert summary.messages == pytest.approx(messages)
    assert summary.copies_sent == pytest.approx(copies)


def test_a_topology_that_moves_the_mean_has_no_rate() -> None:
    """It can be listed and drawn; its mixing speed is not a number."""
    summary = summarize(parse("star(weights=uniform)", 8))
    assert summary.mixing_rate is None
    assert summary.rounds_to_consensus is None
