"""FSDP2 inside nodes, gossip between them: a node is one worker with one sharded replica."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import sharded_ranks
from tests.killed_shard import MODES, TIMEOUT
from tests.pool import ProcessPool
from tests.reference import batch, vector_of
from tests.sharded_ranks import Run

# Processes that each import torch and FSDP: a loaded machine takes its time.
pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Six processes: two nodes of three."""
    processes = ProcessPool(6, tmp_path_factory.mktemp("six"))
    yield processes
    processes.close()


PARITY = [
    Run("awc", "sgd_nesterov", clip_norm=0.5),
    Run("awc", "adamw"),
    Run("atc", "sgd_nesterov"),
    Run("atc", "adamw", clip_norm=0.5, options=(("norms_every", 2),)),
]
ALGORITHMS = [
    Run("awc", "accum_adamw", "one_peer_exponential"),
    Run("awc", "smooth_adamw", "one_peer_exponential"),
    Run("gradient_tracking", "adamw"),
    Run("exact_diffusion", "sgd"),
    Run("push_sum", "sgd"),
    Run("mixed_moments(moment=exp_avg, period=2)", "adamw"),
    Run("quasi_global", "sgd"),
    Run("awc", "sgd", "ring", control="constant(c=0.25)"),
]
IN_TURN = Run("awc", "sgd", num_steps=8, options=(("fragments", 3),))


def name_of(run: Run) -> str:
    """Return the id of a test."""
    return f"{run.algorithm} {run.optimizer}"


def check(pool: ProcessPool, run: Run, ranks_per_node: int) -> None:
    """Compare the results of all ranks with the simulation."""
    results = pool.run(sharded_ranks.train, run)
    sim = sharded_ranks.simulate(run, ranks_per_node)
    average = vector_of(sim.average())
    for rank, result in enumerate(results):
        expected = sharded_ranks.vectors(sim)[rank // ranks_per_node]
        torch.testing.assert_close(result["vector"], expected, rtol=0, atol=1e-10)
        # Two workers that push share out all they have evenly, and are equal after it.
        assert result["distance"] > 1e-4 or run.algorithm == "push_sum"
        assert result["distance"] == pytest.approx(sim.consensus_distance(), abs=1e-10)
        for name in ("average", "state", "final"):
            torch.testing.assert_close(result[name], average, rtol=0, atol=1e-10)
        assert result["restored"]
        assert np.array_equal(result["sketches"], results[0]["sketches"])
        if sim.last_norms is not None:
            np.testing.assert_allclose(result["norms"], sim.last_norms, rtol=0, atol=1e-10)


@pytest.mark.parametrize("run", PARITY, ids=name_of)
def test_two_nodes_of_two_equal_the_simulation(pool: ProcessPool, run: Run) -> None:
    """Uneven shards: parameters, averages, distance and norms equal those of two workers."""
    check(pool, run, 2)


@pytest.mark.parametrize("run", PARITY, ids=name_of)
def test_two_nodes_of_three_equal_the_simulation(six: ProcessPool, run: Run) -> None:
    """The same if the third rank has an empty shard of one layer."""
    check(six, run, 3)


@pytest.mark.parametrize("run", ALGORITHMS, ids=name_of)
def test_every_algorithm_mixes_shards(pool: ProcessPool, run: Run) -> None:
    """States of algorithms are sharded, and a control observes sketches of full replicas."""
    check(pool, run, 2)


def test_fragments_of_shards(pool: ProcessPool) -> None:
    """Each exchange is of some shards, and only these are copied."""
    results = pool.run(sharded_ranks.train, IN_TURN)
    whole = pool.run(sharded_ranks.train, Run("awc", "sgd", num_steps=8))
    assert all(a["bytes"] < 0.7 * b["bytes"] for a, b in zip(results, whole, strict=True))
    assert torch.equal(results[0]["vector"], results[1]["vector"])
    assert 0 < results[0]["distance"] < 10 * whole[0]["distance"]


@pytest.mark.parametrize("wire", ["bf16", "modulo(bits=8)"])
def test_shards_in_few_bits(pool: ProcessPool, wire: str) -> None:
    """Copies of shards are sent in few bits: the result is close to full precision."""
    run = Run("awc", "sgd")
    coded = pool.run(sharded_ranks.train, replace(run, options=(("wire", wire),)))
    full = pool.run(sharded_ranks.train, run)
    for one, other in zip(coded, full, strict=True):
        assert one["bytes"] < 0.7 * other["bytes"]
        torch.testing.assert_close(one["vector"], other["vector"], rtol=0, atol=0.05)
        torch.testing.assert_close(one["average"], other["average"], rtol=0, atol=0.02)
    assert torch.equal(coded[0]["vector"], coded[1]["vector"])


def test_evaluation_between_steps_changes_nothing(pool: ProcessPool) -> None:
    """FSDP keeps the root unsharded after a forward pass: its average is never mixed."""
    run = Run("awc", "adamw")
    sim = sharded_ranks.simulate(run, 2)
    inputs, _ = batch(0, 0)
    for rank, (outputs, vector) in enumerate(pool.run(sharded_ranks.evaluate_between_steps, run)):
        worker = sim.worker(rank // 2)
        expected = [model(inputs).detach() for model in (worker, sim.average(), worker)]
        torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(vector, vector_of(worker), rtol=0, atol=1e-10)


def test_a_shard_that_is_not_finite_leaves_out_all_of_its_replica(pool: ProcessPool) -> None:
    """A NaN on one rank of node 1: both of its ranks are left out from then on."""
    run = Run("awc", "sgd", num_steps=5, options=(("nonfinite_rounds", 0),))
    results = pool.run(sharded_ranks.train_with_nan, run)
    for finite, left_out in results[:2]:
        assert all(finite)
        assert left_out == {1: 3}
    for finite, left_out in results[2:]:
        assert finite == [True, False, False, False, False]
        assert left_out == {1: 3}


def test_all_nodes_skip_a_step_where_one_shard_overflows(pool: ProcessPool) -> None:
    """GradScaler: FSDP agrees on the infinity within the node, gossip between nodes."""
    for seen in pool.run(sharded_ranks.train_scaled, Run("awc", "sgd")):
        assert seen == [(4.0, 1), (2.0, 1), (2.0, 2)]


def test_shards_in_single_precision_with_computation_in_bfloat16(pool: ProcessPool) -> None:
    """A MixedPrecisionPolicy changes the precision of computation, not of mixing."""
    for dtype, distance, are_equal in pool.run(sharded_ranks.train_in_bfloat16):
        assert dtype == torch.float32
        assert distance > 0
        assert are_equal


@pytest.mark.parametrize("optimizer", ["accum_adamw", "smooth_adamw"])
def test_shards_of_16_bit_parameters(pool: ProcessPool, optimizer: str) -> None:
    """Optimizers of ours step on shards as on whole tensors."""
    for shards, whole in pool.run(sharded_ranks.train_16_bits, optimizer):
        torch.testing.assert_close(shards, whole, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("run", [Run("gradient_tracking", "adamw"), ALGORITHMS[0]], ids=name_of)
def test_a_run_continues_from_a_distributed_checkpoint(
    pool: ProcessPool, run: Run, tmp_path: Path
) -> None:
    """Shards, moments and trackers through torch.distributed.checkpoint: the same bits."""
    uncut = pool.run(sharded_ranks.save, run, str(tmp_path / "run"))
    resumed = pool.run(sharded_ranks.resume, run, str(tmp_path / "run"))
    assert all(torch.equal(a, b) for a, b in zip(uncut, resumed, strict=True))
    assert not torch.equal(uncut[0], uncut[2])


def test_the_average_goes_through_a_distributed_checkpoint(
    pool: ProcessPool, tmp_path: Path
) -> None:
    """``averaged_state_dict()`` is sharded as the model is, and another model can load it."""
    assert all(pool.run(sharded_ranks.save_average, Run(), str(tmp_path / "average")))


def test_shards_that_cannot_gossip_are_refused(pool: ProcessPool) -> None:
    """On every rank, with a remedy; a rank that differs from its node stops all nodes at once."""
    for messages in pool.run(sharded_ranks.refusals):
        by_tensor, hybrid, in_part, otherwise, everywhere, one_differs, checkpoints = messages
        assert "0.weight, a DTensor that fully_shard() does not own, as tensor par" in by_tensor
        assert "on one of 2, as HSDP and tensor parallelism do" in hybrid
        assert "got 0.weight, which is not, and whose gradient FSDP does not average" in in_part
        assert "the shard of 3.weight is [" in otherwise
        assert "of dim 0 on rank 0 and [3, 2] of dim 1 on rank 1" in otherwise
        assert "sharded over ranks [0, 1] of" in everywhere or "ranks [2, 3] of" in everywhere
        assert "topology is complete on rank 0 and ring on rank 1" in one_differs
        assert "got shards of FSDP2; save them by torch.distributed.checkpoint" in checkpoints


def test_a_killed_rank_ends_all_nodes(tmp_path: Path) -> None:
    """All others raise within twice the timeout; after a stall all but those of its node.

    These wait in FSDP until its own process group times out.
    """
    subprocess.run([sys.executable, "-m", "tests.killed_shard", str(tmp_path)], check=True)
    text = {path.name: path.read_text() for path in tmp_path.glob("*.*")}
    for mode in MODES:
        for rank in (0, 1):
            assert float(text[f"{mode}-{rank}.seconds"]) < 2 * TIMEOUT.total_seconds()
            # By their own exchange or what their node's other rank says of its.
            assert re.search("ExchangeError.*rank 1 (is gone|raised)", text[f"{mode}-{rank}.err"])
    assert float(text["killed-2.seconds"]) < 2 * TIMEOUT.total_seconds()
    assert float(text["stalled-2.seconds"]) > 2 * TIMEOUT.total_seconds()
