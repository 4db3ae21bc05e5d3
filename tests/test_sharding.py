"""Which samples workers see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import UserError
from gossamer.workloads import Draw, draw_batches, parse_sharding

SHARDINGS = ("iid", "fixed", "dirichlet(alpha=0.3)")


def draw(num_samples: int = 100, num_workers: int = 4, seed: int = 0, **options: Any) -> Draw:
    options = {"batch_size": 5, "steps_per_epoch": 5, **options}
    labels = options.pop("labels", np.arange(num_samples) % 7)
    return Draw(
        num_samples=num_samples, num_workers=num_workers, seed=seed, labels=labels, **options
    )


@pytest.mark.parametrize("sharding", SHARDINGS)
@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 9), st.integers(1, 9))
def test_no_sample_comes_twice_while_shards_suffice(
    sharding: str, num_samples: int, num_workers: int, batch_size: int, steps: int
) -> None:
    """In an epoch all workers together see each sample once, as far as samples go around."""
    if sharding != "iid" and num_samples < num_workers:
        return
    deal = draw(
        num_samples=num_samples,
        num_workers=num_workers,
        batch_size=batch_size,
        steps_per_epoch=steps,
        sharding=sharding,
    )
    seen = draw_batches(deal, range(num_workers), 3)
    assert seen.shape == (num_workers, steps, batch_size)
    assert seen.min() >= 0
    assert seen.max() < num_samples
    smallest = num_samples // num_workers
    if smallest >= steps * batch_size:
        assert len(np.unique(seen)) == seen.size
    elif smallest >= batch_size:  # every worker goes through its shard before it starts again
        for own in seen:
            counts = np.unique_counts(own).counts
            assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("sharding", SHARDINGS)
@given(st.integers(8, 300), st.integers(1, 8))
@settings(max_examples=30)
def test_remainders_are_dealt_too(sharding: str, num_samples: int, num_workers: int) -> None:
    """Long epochs show every sample to exactly one worker; sizes differ by one at most."""
    deal = draw(
        num_samples=num_samples,
        num_workers=num_workers,
        batch_size=1,
        steps_per_epoch=-(-num_samples // num_workers),
        sharding=sharding,
    )
    shards = [np.unique(own) for own in draw_batches(deal, range(num_workers), 0)]
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(num_samples))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_batches_depend_on_seed_worker_and_epoch_alone(sharding: str) -> None:
    """The same three give the same samples, drawn alone or with others; any other gives others."""
    usual = draw_batches(draw(sharding=sharding), [1], 2)[0]
    assert np.array_equal(usual, draw_batches(draw(sharding=sharding), [3, 1], 2)[1])
    for other in (
        draw_batches(draw(sharding=sharding, seed=1), [1], 2)[0],
        draw_batches(draw(sharding=sharding), [0], 2)[0],
        draw_batches(draw(sharding=sharding), [1], 3)[0],
    ):
        assert not np.array_equal(usual, other)


@pytest.mark.parametrize("sharding", ["fixed", "dirichlet(alpha=0.3)"])
def test_shards_stay_with_their_workers(sharding: str) -> None:
    """A worker sees the same samples in every epoch, in another order."""
    first, second = (draw_batches(draw(sharding=sharding), range(4), epoch) for epoch in (0, 1))
    assert not np.array_equal(first, second)
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(np.unique(one), np.unique(other))


@pytest.mark.parametrize(("alpha", "largest_share"), [(0.1, 0.66), (0.5, 0.38), (1000.0, 0.1)])
def test_dirichlet_shards_are_skewed_as_their_alpha_says(
    alpha: float, largest_share: float
) -> None:
    """The largest class of a worker has the share that Dirichlet(alpha) over 10 classes gives."""
    labels = np.random.default_rng(0).integers(10, size=50_000)
    deal = draw(
        num_samples=50_000,
        num_workers=100,
        batch_size=100,
        labels=labels,
        sharding=f"dirichlet(alpha={alpha})",
    )
    own = labels[draw_batches(deal, range(100), 0)].reshape(100, -1)
    shares = np.stack([np.bincount(row, minlength=10) for row in own]) / own.shape[1]
    assert shares.max(1).mean() == pytest.approx(largest_share, abs=0.03)


def test_more_workers_than_samples_draw_with_replacement() -> None:
    """With shards below a batch each worker's samples come from all, and differ between workers."""
    deal = draw(num_samples=100, num_workers=50, batch_size=8, steps_per_epoch=20)
    first, second = draw_batches(deal, [0, 1], 0)
    assert not np.array_equal(first, second)
    assert len(np.unique(first)) > 70  # of 160 draws from 100
    with pytest.raises(UserError, match="a worker must be one of 0 to 49, got 50"):
        draw_batches(deal, [0, 50], 0)
    with pytest.raises(UserError, match="got 3 samples for 4 workers; use sharding iid"):
        draw_batches(draw(num_samples=3, sharding="fixed"), [0], 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"a sharding is a name .* for instance iid or dirichlet\(alpha=0.5\)"),
        ("iidd", "unknown sharding 'iidd' .did you mean 'iid'.*; choose from iid, fixed, dirichl"),
        ("dirichlet", r"needs alpha, got no arguments; for instance dirichlet\(alpha=0.5\)"),
        ("dirichlet()", r"needs alpha, got no arguments; for instance dirichlet\(alpha=0.5\)"),
        ("dirichlet(alpha=0)", r"a finite alpha > 0, got 0.0; for instance dirichlet\(alpha=0.5"),
        ("dirichlet(alpha=1e400)", "a finite alpha > 0, got inf"),
        ("dirichlet(alpha=1e1e1)", r"a sharding is a name .* dirichlet\(alpha=0.5\)"),
    ],
)
def test_a_sharding_that_is_none_is_refused(text: str, words: str) -> None:
    """The message says what there is, with an example."""
    with pytest.raises(UserError, match=words):
        parse_sharding(text)


def test_skew_needs_classes() -> None:
    """Where samples have no classes, there is nothing to skew."""
    with pytest.raises(UserError, match="need samples with classes, and these have none"):
        draw_batches(draw(labels=None, sharding="dirichlet(alpha=1)"), [0], 0)
