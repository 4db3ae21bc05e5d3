"""Rounds that are held as groups: the same answers as their matrix, without its memory."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.cli.topology import topology_command
from gossamer.consensus import theta
from gossamer.runtime_model.costs import Links, mix
from gossamer.simulate.mixing import mix_
from gossamer.topology import (
    Round,
    Schedule,
    ada,
    complete,
    from_matrix,
    metropolis,
    parse,
    spaced,
    static,
    uniform,
)
from gossamer.topology.partition import Partition
from gossamer.topology.spectrum import consensus_decay
from gossamer.topology.summary import summarize
from gossamer.topology.weights import group_average

LABELS = st.one_of(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    # Groups that are one group moved on: all workers, each alone, and what is between.
    st.builds(lambda groups, size: [*range(groups)] * size, st.integers(1, 4), st.integers(1, 4)),
)
MANY = 3000
"""Enough workers for every branch that is for many."""


def explicit(labels: list[int]) -> Round:
    """Return the average within groups by its definition: W_ij = 1/g where labels are equal."""
    same = np.equal.outer(labels, labels)
    return from_matrix(same / same.sum(axis=1, keepdims=True))


def answers(round: Round) -> list[Any]:
    """Return all that a round can be asked, in types that compare."""
    arrays = [round.in_degrees, round.out_degrees, round.self_weights, round.reduces]
    arrays += [round.messages_sent, round.copies_sent, *round.messages(), *(round.shifts or ())]
    arrays += [*(round.groups() or ()), *round.reduced_groups()]
    for worker in range(round.num_workers):
        self_weight, receives, sends = round.neighbours(worker)
        arrays += [np.array(self_weight), *receives, *sends, np.array(round.group_of(worker))]
    w = round.matrix()
    return [
        *(array.tolist() for array in (*arrays, w.toarray(), w.indices, w.indptr)),
        *(round.num_workers, round.degree, round.symmetric, round.conserves_mean),
        *(round.averages_all, round.is_connected, round.digest, hash(round), repr(round)),
    ]


@given(labels=LABELS)
def test_groups_and_their_matrix_are_one_round(labels: list[int]) -> None:
    """They are equal, and every answer is the same, bit for bit."""
    held, read = group_average(np.array(labels)), explicit(labels)
    assert held == read
    assert answers(held) == answers(read)
    assert answers(pickle.loads(pickle.dumps(held))) == answers(held)


@given(labels=LABELS, columns=st.integers(0, 3))
def test_mixing_within_groups_has_the_bits_of_the_product(labels: list[int], columns: int) -> None:
    """Controllers decide from it, so that a round must decide alike however it is held."""
    shape = (len(labels), columns) if columns else len(labels)
    x = np.random.default_rng(0).standard_normal(shape)
    for round in (group_average(np.array(labels)), explicit(labels)):
        product: Any = round.matrix() @ x
        assert np.array_equal(round.mixed(x), product)


@given(num_workers=st.integers(1, 40))
def test_the_complete_round_is_the_same_under_every_rule(num_workers: int) -> None:
    """Rules that weigh a regular graph evenly make the value without edges, others an equal one."""
    rounds = [complete(num_workers, weights=rule) for rule in (uniform, metropolis)]
    assert [complete(num_workers)] * 2 == rounds
    assert (
        complete(num_workers).matrix().toarray().tolist() == rounds[0].matrix().toarray().tolist()
    )


def test_the_average_of_many_workers_takes_no_memory() -> None:
    """As a value a few hundred bytes, and no answer takes more than arrays over workers."""
    num_workers = 100_000
    tracemalloc.start()
    try:
        round = complete(num_workers)
        held, _ = tracemalloc.get_traced_memory()
        x = np.ones((num_workers, 1))
        assert np.allclose(round.mixed(x), 1)
        assert round == pickle.loads(pickle.dumps(round))
        assert round.neighbours(7).sends.workers.size == round.degree == num_workers - 1
        assert round.shifts is not None
        assert round.copies_sent.max() < 2 < round.messages_sent.min()
        assert [len(part) for part in round.messages()] == [0, 0]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 10_000
    assert peak < 200 * num_workers
    assert len(pickle.dumps(round)) < 1000


@pytest.mark.parametrize(
    "schedule",
    [
        static(complete(MANY)),
        parse("complete", MANY),
        spaced(parse("complete", MANY), every=2),
        ada(MANY, k0=MANY, gamma=1.0, steps_per_epoch=100),
    ],
    ids=["static", "parsed", "spaced", "ada"],
)
def test_nobody_needs_the_matrix_of_the_complete_round(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summaries, mixing, costs, distances and controllers all do without its n² entries."""

    def refuse(self: Partition) -> None:
        raise AssertionError(f"the matrix of {self.num_groups} groups was built")

    monkeypatch.setattr(Partition, "matrix", refuse)
    last = schedule.round(1)
    assert summarize(schedule).mixing_rate == 1
    assert consensus_decay(schedule, 2)[-1] == 0
    x = np.random.default_rng(0).standard_normal((MANY, 2))
    stacked = torch.from_numpy(x.copy())
    mix_(stacked, last)
    np.testing.assert_allclose(stacked.numpy(), last.mixed(x), atol=1e-15)
    assert theta(last.mixed(x), last) < 1e-12 < theta(x, last)
    links = Links(
        node_of=np.arange(MANY), port_bits_s=np.ones(MANY), uplink_bits_s=np.full(MANY, np.inf)
    )
    np.testing.assert_allclose(mix(links, last, [1]).cost_WK, 8 * last.copies_sent[:, None])


def test_the_command_line_shows_the_complete_graph_of_many_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`gossamer topology complete -n 10000` takes no time and no memory to speak of."""
    monkeypatch.setattr(Partition, "matrix", None)
    topology_command("complete", workers=10_000)
    assert "1 round" in capsys.readouterr().out
