"""DDP inside nodes with ``within=``: each rank exchanges its slice, and a node sends one copy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import sharded_ranks, sliced_ranks
from tests.pool import ProcessPool
from tests.reference import vector_of
from tests.sharded_ranks import Run

# Processes that each import torch: a loaded machine takes its time.
pytestmark = pytest.mark.timeout(150)

RUNS = [
    Run("awc", "adamw", clip_norm=0.5, num_steps=30),
    Run("atc", "sgd_nesterov", num_steps=10),
    Run("gradient_tracking", "sgd"),
    Run("push_sum", "sgd"),
    Run("mixed_moments(moment=exp_avg, period=2)", "adamw"),
]


def name_of(run: Run) -> str:
    """Return the id of a test."""
    return f"{run.algorithm} {run.optimizer}"


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_slices_change_nothing(pool: ProcessPool, run: Run) -> None:
    """The run equals one in which every rank sends all; local ranks are equal at every step."""
    sliced = pool.run(sliced_ranks.train, run, True)
    whole = pool.run(sliced_ranks.train, run, False)
    sim = sharded_ranks.simulate(run, 2)
    for first, second in (sliced[:2], sliced[2:]):
        for mine, theirs in zip(first["after"], second["after"], strict=True):
            assert torch.equal(mine, theirs)
    for rank, (ours, theirs) in enumerate(zip(sliced, whole, strict=True)):
        assert ours["restored"]
        torch.testing.assert_close(ours["after"], theirs["after"], rtol=0, atol=1e-12)
        torch.testing.assert_close(ours["average"], theirs["average"], rtol=0, atol=1e-12)
        assert torch.equal(ours["final"], sliced[0]["final"])
        assert ours["distance"] == pytest.approx(theirs["distance"], abs=1e-12)
        np.testing.assert_allclose(ours["sketches"], theirs["sketches"], rtol=0, atol=1e-12)
        expected = vector_of(sim.worker(rank // 2))
        torch.testing.assert_close(ours["after"][-1], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"wire": "modulo(bits=8)"}, {"wire": "bf16", "fragments": 2}])
def test_slices_in_few_bits(pool: ProcessPool, options: dict[str, Any]) -> None:
    """Local ranks hold the same bits after every step, close to those of full precision."""
    run = Run("awc", "sgd", num_steps=8)
    coded = pool.run(sliced_ranks.train, replace(run, options=tuple(options.items())), True)
    full = pool.run(sliced_ranks.train, run, True)
    for first, second in (coded[:2], coded[2:]):
        for mine, theirs in zip(first["after"], second["after"], strict=True):
            assert torch.equal(mine, theirs)
    for one, other in zip(coded, full, strict=True):
        assert one["bytes"] < 0.7 * other["bytes"]
        assert one["restored"]
        torch.testing.assert_close(one["average"], other["average"], rtol=0, atol=0.05)


def test_a_node_sends_one_copy(pool: ProcessPool) -> None:
    """89 parameters of 8 bytes: two copies per exchange without slices, and one with them."""
    run = Run(num_steps=5)
    sliced = pool.run(sliced_ranks.train, run, True)
    whole = pool.run(sliced_ranks.train, run, False)
    # As many exchanges as steps. Tensors of 280, 56, 224, 32, 96 and 24 bytes, of which the last
    # three share a bucket, each in rows of 64 bytes; slices are rows, too.
    rows = [5, 1, 4, 1 + 2 + 1]
    assert [result["bytes"] for result in whole] == [5 * 64 * sum(rows)] * 4
    slices = [-(-row // 2) for row in rows]
    assert [result["bytes"] for result in sliced] == [5 * 64 * sum(slices)] * 4
    assert 2 * sum(slices) <= sum(rows) + len(rows)
    assert [result["messages"] for result in sliced] == [5 * len(rows)] * 4


def test_a_slice_that_is_not_finite_leaves_out_the_node(pool: ProcessPool) -> None:
    """A NaN in one slice: the rank with the other slice is left out, too."""
    results = pool.run(sliced_ranks.train_with_nan)
    assert results == [(True, {1: 2})] * 2 + [(False, {1: 2})] * 2


def test_running_statistics_are_averaged_over_all_ranks(pool: ProcessPool) -> None:
    """In training they are each rank's own; the average is over the ranks of all nodes."""
    results = pool.run(sliced_ranks.average_statistics)
    assert not any(torch.equal(a[0], b[0]) for a, b in pairwise(results))
    mean = torch.stack([own for own, _ in results]).mean(0)
    for _, averaged in results:
        torch.testing.assert_close(averaged, mean, rtol=0, atol=1e-12)


def test_a_run_continues_from_checkpoints_of_each_place(pool: ProcessPool, tmp_path: Path) -> None:
    """``Checkpoints`` with a folder for each place: the same bits at the end."""
    run = Run("gradient_tracking", "adamw")
    assert all(pool.run(sliced_ranks.save_and_resume, run, str(tmp_path)))


def test_an_interrupted_rank_stops_all_places(pool: ProcessPool, tmp_path: Path) -> None:
    """Ranks of other places are informed by their node, and all stop at the same step."""
    steps = pool.run(sliced_ranks.interrupt_one, str(tmp_path))
    assert len({*steps}) == 1
    assert steps[0] < 10


def test_ranks_that_cannot_share_a_replica_are_refused(pool: ProcessPool) -> None:
    """Other bits, no DDP over them, a group of ranks that gossip, a 2-d mesh, and shards."""
    results = pool.run(sliced_ranks.refusals)
    for messages in results:
        different, bare, elsewhere, same, square, sharded = messages
        assert "the digest of module.2.0.bias is" in different
        assert "on rank 1; ranks within a node hold one replica: wrap the model in" in different
        assert "within= with a model that no DDP over ranks" in bare
        assert "within= with a model that no DDP over ranks" in elsewhere
        assert "must not gossip with each other" in same
        assert "a mesh must have one dimension, got 2; pass the part inside a node" in square
        assert "a model whose shards name their ranks; leave it out" in sharded
