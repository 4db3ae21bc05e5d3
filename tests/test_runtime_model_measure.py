"""Profiles by measurement: hooks around a loop, links between ranks, and the benchmark's score."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from benchmarks.runtime_model.score import Point, score
from gossamer.errors import UserError
from gossamer.lab.compute import EmulatedModel
from gossamer.runtime_model import links, make_plan, measure, read_profile
from gossamer.runtime_model.measure import measure as measure_loop
from gossamer.runtime_model.presets import LINKS
from tests.pool import ProcessPool

SIZE = 400_000
FORWARD_S, BACKWARD_S = 0.03, 0.06


def train(path: Path, kind: str) -> int:
    """Profile a loop of one kind; return how many hooks are left on the model at its end."""
    with (
        mock.patch.object(links, "_WINDOW_S", 0.004),
        mock.patch.object(measure, "_TINY_STEPS", 3),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}),
    ):
        torch.manual_seed(0)
        model = EmulatedModel(
            num_params=SIZE, num_layers=2, forward_s=FORWARD_S, backward_s=BACKWARD_S
        )
        wrapped: nn.Module = DistributedDataParallel(model) if kind == "ddp first" else model
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        measure_loop(wrapped, optimizer, path, steps=4, warmup=1, name=kind)
        gossip = gossamer.decentralize(model, optimizer) if kind == "gossip" else None
        if kind == "ddp":
            wrapped = DistributedDataParallel(model)
        for _ in range(7):
            with torch.no_grad():  # an evaluation, which is not training
                model(torch.ones(2, model.width))
            optimizer.zero_grad()
            wrapped(torch.ones(2, model.width)).mean().backward()
            optimizer.step()
            optimizer.step()  # one more, as some loops do: no step of its own
        if gossip is not None:
            gossip.close()
    return len(model._forward_hooks) + len(optimizer._optimizer_step_post_hooks)


@pytest.mark.parametrize("kind", ["local", "gossip", "ddp", "ddp first"])
def test_a_loop_is_timed_by_two_lines(pool: ProcessPool, tmp_path: Path, kind: str) -> None:
    """The compute time is that of the sleeps, for every method; hooks are removed at the end."""
    left = pool.run(train, tmp_path / "profile.json", kind)
    assert left == [0] * 4
    profile = read_profile(tmp_path / "profile.json")
    assert (profile.name, profile.workers, profile.network.workers_per_node) == (kind, 4, 2)
    backward_s = sum(bucket.backward_s for bucket in profile.buckets)
    assert FORWARD_S <= profile.forward_s < 3 * FORWARD_S
    assert BACKWARD_S * 0.9 <= backward_s < 3 * BACKWARD_S
    assert profile.num_bytes == pytest.approx(4 * SIZE, rel=0.01)
    assert len(profile.factors) == 4 * 4
    assert len(profile.pairs) == 6
    assert profile.network.between is not None
    assert profile.network.between.bits_s > 1e6


def train_in_parts(path: Path) -> None:
    """Profile a model one half of which has no gradient, in one node."""
    with (
        mock.patch.object(links, "_WINDOW_S", 0.004),
        mock.patch.object(measure, "_TINY_STEPS", 3),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "4"}),
    ):
        model = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        measure_loop(model, optimizer, path, steps=2, warmup=1)
        for _ in range(3):
            used = model[dist.get_rank() % 2]
            model.forward = used.forward  # another half on every second rank
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_parameters_without_a_gradient_travel_too(pool: ProcessPool, tmp_path: Path) -> None:
    """Ranks that use different parameters agree on buckets that hold all of them; a profile of one
    node has no link between nodes, and a plan says where it needs one.
    """
    pool.run(train_in_parts, tmp_path / "profile.json")
    profile = read_profile(tmp_path / "profile.json")
    assert profile.num_bytes == 2 * 8 * 8 * 4
    assert profile.network.between is None
    assert make_plan(profile, [4]).advice[0].workers == 4
    with pytest.raises(UserError, match="gossamer plan --link 25gbit"):
        make_plan(profile, [8])
    assert make_plan(profile.with_between(LINKS["25gbit"]), [8]).advice[0].workers == 8


def test_a_loop_that_is_too_short_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The warning says how many steps were missing."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = measure._Stopwatch(model, optimizer, list(model.parameters()), 1, 2, mock.Mock())
    atexit.unregister(watch._warn)
    model(torch.ones(1)).backward()
    optimizer.step()
    watch._warn()
    assert "needs 3 steps of the optimizer, warm-up included, got 1" in caplog.text


def test_buckets_are_filled_as_ddp_fills_them() -> None:
    """In the order of gradients; the first closes at a megabyte, others at 25."""
    megabyte = [torch.zeros(300_000) for _ in range(40)]
    parts = measure._assign(list(range(40))[::-1], megabyte)
    assert parts[0] == [39]
    assert [len(part) for part in parts] == [1, 22, 17]


def test_waiting_for_an_all_reduce_is_not_compute() -> None:
    """The time from the last gradient to the step is clipping, but under DDP it is waiting."""
    step = measure._StepTimes(
        previous_end=0.0,
        forward_start=1.0,
        forward_end=2.0,
        ready={0: 3.0, 1: 2.5},
        called=7.0,
        update_start=8.0,
        update_end=8.5,
    )
    assert measure._times(step, [[1], [0]]) == [1.0 + 4.0, 1.0, 0.5, 0.5, 0.5]
    step.under_ddp = True
    assert measure._times(step, [[1], [0]])[0] == 1.0


def test_steps_that_are_long_for_all_do_not_vary() -> None:
    """Only differences between ranks count, as large as independent times would have."""
    even = [[1.0, 2.0, 0.5], [1.0, 2.0, 0.5]]
    assert measure._factors(even) == [1.0] * 6
    rng = np.random.default_rng(0)
    drawn = rng.gamma(1 / 0.0134, 0.0134, (2, 4000)) * rng.uniform(0.5, 2, 4000)
    assert np.var(measure._factors(drawn.tolist())) == pytest.approx(0.0134, rel=0.1)


def test_one_rank_has_no_links() -> None:
    """Without a process group the error says how to start the script."""
    assert not dist.is_initialized()
    model = nn.Linear(1, 1)
    with pytest.raises(UserError, match="torchrun or gossamer lab"):
        measure_loop(model, torch.optim.SGD(model.parameters()), "profile.json")
    with pytest.raises(UserError, match="2 steps and 1 of warm-up"):
        measure_loop(model, torch.optim.SGD(model.parameters()), "profile.json", steps=1)


def test_pairs_of_many_ranks_are_neighbours_inside_and_across() -> None:
    """All pairs of a few ranks; of many, some of both kinds."""
    assert len(links._choose_pairs(4, 1)) == 6
    chosen = links._choose_pairs(64, 8)
    assert len(chosen) <= 12
    assert {first // 8 == second // 8 for first, second in chosen} == {True, False}


def point(method: str, measured: float | None, predicted: float, **changes: object) -> Point:
    fields: dict[str, object] = {"saturated": False, "advised": False, **changes}
    return Point(
        hosts=4,
        network="1gbit",
        variance=0.0,
        method=method,
        measured_ms=measured,
        lowest_ms=measured,
        highest_ms=measured,
        predicted_ms=predicted,
        cpu=0.5,
        **fields,  # pyright: ignore[reportArgumentType]
    )


def test_the_score_counts_errors_ranks_and_advice() -> None:
    """Saturated rows are left out, and methods within 5 % may be ranked either way."""
    points = [
        point("a", 100, 110, advised=True),
        point("b", 98, 120),
        point("c", 200, 90),
        point("d", 10, 1000, saturated=True),
        point("e", None, 1000),
    ]
    result = score(points)
    assert (result.points, result.saturated, result.failed, result.pairs) == (3, 1, 1, 2)
    assert result.worst_error == pytest.approx(0.55)
    assert result.ranked_right == 0
    assert result.worst_advice == pytest.approx(100 / 98 - 1)
    # The plan is of overlapped methods.
    waiting = point("gossamer(ring, atc)", 50, 60)
    assert score([*points, waiting]).worst_advice == result.worst_advice
