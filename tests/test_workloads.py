"""Workloads and the samples that their workers see."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer import workloads
from gossamer.errors import UserError
from gossamer.workloads import WORKLOADS, Draw, draw_batches


def draw(**options: int) -> Draw:
    usual = {"num_samples": 100, "num_workers": 4, "batch_size": 5, "steps_per_epoch": 5, "seed": 0}
    return Draw(**{**usual, **options})


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 9), st.integers(1, 9))
def test_no_sample_comes_twice_while_shards_suffice(
    num_samples: int, num_workers: int, batch_size: int, steps: int
) -> None:
    """In an epoch all workers together see each sample once, as far as samples go around."""
    deal = draw(
        num_samples=num_samples,
        num_workers=num_workers,
        batch_size=batch_size,
        steps_per_epoch=steps,
    )
    seen = np.stack([draw_batches(deal, worker, 3) for worker in range(num_workers)])
    assert seen.shape == (num_workers, steps, batch_size)
    assert seen.min() >= 0
    assert seen.max() < num_samples
    smallest = num_samples // num_workers
    if smallest >= steps * batch_size:
        assert len(np.unique(seen)) == seen.size
    elif smallest >= batch_size:  # every worker goes through its shard before it starts again
        for worker in range(num_workers):
            counts = np.unique_counts(seen[worker]).counts
            assert counts.max() - counts.min() <= 1


def test_batches_depend_on_seed_worker_and_epoch_alone() -> None:
    """The same three give the same samples; any other gives others."""
    usual = draw_batches(draw(), 1, 2)
    assert np.array_equal(usual, draw_batches(draw(), 1, 2))
    for other in (
        draw_batches(draw(seed=1), 1, 2),
        draw_batches(draw(), 0, 2),
        draw_batches(draw(), 1, 3),
    ):
        assert not np.array_equal(usual, other)


def test_more_workers_than_samples_draw_with_replacement() -> None:
    """With shards below a batch each worker's samples come from all, and differ between workers."""
    deal = draw(num_samples=100, num_workers=50, batch_size=8, steps_per_epoch=20)
    first, second = draw_batches(deal, 0, 0), draw_batches(deal, 1, 0)
    assert not np.array_equal(first, second)
    assert len(np.unique(first)) > 70  # of 160 draws from 100
    with pytest.raises(UserError, match="a worker must be one of 0 to 49, got 50"):
        draw_batches(deal, 50, 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_parts_that_fit(name: str) -> None:
    """Its model takes its data, its loss has a gradient, its metric is a number."""
    workload = workloads.find(name)
    data = workload.load()
    model = workload.make_model()
    few = torch.arange(4)
    outputs = model(workload.transform(data.train_inputs[few], np.random.default_rng(0)))
    loss = workload.loss(outputs, data.train_targets[few])
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert math.isfinite(workload.evaluate(model.eval(), data))


def test_an_unknown_workload_suggests_the_nearest() -> None:
    """A typing error costs one look."""
    with pytest.raises(UserError, match="got 'digit-mlp'; did you mean 'digits-mlp'"):
        workloads.find("digit-mlp")
