from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.consensus import (
    Sketch,
    bounds,
    consensus_distance,
    sketch_distance,
    sketch_error,
    theta,
)
from gossamer.errors import UserError
from gossamer.topology import one_peer_ring, parse, star
from gossamer.topology.spectrum import mixing_parameter
from gossamer.topology.weights import uniform
from tests.catalogue import ALL_TOPOLOGIES, VARIANTS, sizes_of


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stacked_model(num_workers: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Tensors whose rows are low-rank, as weight updates are, and near each other."""
    rng = seeded(0)
    shapes = [(150, 512), (300,), (64, 512), (7, 3, 5)]
    common = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]
    left = torch.rand(num_workers, 150, 1, generator=rng, dtype=torch.float64)
    right = torch.rand(num_workers, 1, 512, generator=rng, dtype=torch.float64)
    apart = [1e-2 * torch.randn(num_workers, *s, generator=rng).double() for s in shapes]
    apart[0] = 1e-2 * left @ right
    return [(c + a).to(dtype) for c, a in zip(common, apart, strict=True)]


def test_distance_equals_its_definition() -> None:
    """Ξ² is the mean squared distance to the mean, over all tensors."""
    tensors = stacked_model(5)
    x_WN = torch.cat([t.flatten(1) for t in tensors], dim=1).numpy()
    squared = np.mean([np.sum((x_N - x_WN.mean(0)) ** 2) for x_N in x_WN])
    assert consensus_distance(tensors) == pytest.approx(math.sqrt(squared))


def test_distance_is_exact_where_workers_are_close() -> None:
    """In single precision too, at the last digits of the parameters; equal workers have 0."""
    x_N = torch.randn(10_000, generator=seeded(3))
    near_WN = x_N + 1e-6 * torch.randn(16, 10_000, generator=seeded(4))
    exact = consensus_distance([near_WN.double()])
    assert consensus_distance([near_WN]) == pytest.approx(exact, rel=1e-6)
    assert consensus_distance([x_N.expand(16, -1)]) == 0


@pytest.mark.parametrize("text", ALL_TOPOLOGIES + VARIANTS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_theta_bounds_the_distance(text: str, data: st.DataObject) -> None:
    """Θ/2 ≤ Ξ ≤ Θ/(1 − √(1 − p)) for every round with p > 0; the others are refused."""
    round = parse(text, data.draw(sizes_of(text))).round(data.draw(st.integers(0, 5)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    # Few dimensions reach the slow directions of a graph, where the upper bound is close.
    x_nN = rng.standard_normal((round.num_workers, data.draw(st.integers(1, 4))))
    moved = theta(x_nN, round)
    if mixing_parameter(round) < 1e-9:
        with pytest.raises(UserError, match=r"matching.*use the sketch"):
            bounds(moved, round)
        return
    low, high = bounds(moved, round)
    distance = consensus_distance([torch.from_numpy(x_nN)])
    assert low - 1e-9 <= distance <= high + 1e-9


def test_a_matching_hides_distance_from_theta() -> None:
    """Pairs that agree do not move, however far apart the pairs are: why Θ by itself is refused."""
    pairs = one_peer_ring(4).round(0)
    x_nN = np.array([[0.0], [0.0], [9.0], [9.0]])
    assert theta(x_nN, pairs) == 0
    assert sketch_distance(x_nN) == 4.5


def test_theta_is_refused_where_the_mean_moves() -> None:
    """A round that does not conserve the mean has no p, so no bound."""
    with pytest.raises(UserError, match="conserve the mean"):
        bounds(1.0, star(5, weights=uniform))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cutting_parameters_changes_no_bit(dtype: torch.dtype) -> None:
    """A sketch reads the concatenation: parameters, buckets or pieces of them give equal bits."""
    x_N = torch.randn(200_003, generator=seeded(1)).to(dtype)
    whole = Sketch().sketch([x_N])
    for sizes in ([1, 200_002], [65_152, 65_152, 69_699], [509] * 392 + [475]):
        assert torch.equal(Sketch().sketch(x_N.split(sizes)), whole)


def test_stacked_workers_get_the_rows_of_single_ones() -> None:
    """The simulator's sketches are the ranks'."""
    tensors = stacked_model(3)
    stacked = Sketch().sketch_stacked(tensors)
    for worker in range(3):
        expected = Sketch().sketch([tensor[worker] for tensor in tensors])
        torch.testing.assert_close(stacked[worker], expected, rtol=1e-12, atol=1e-12)


def test_a_sketch_is_linear() -> None:
    """S(ax + by) = aSx + bSy: why a round of sketches is the sketch after the round."""
    x_N, y_N = torch.randn(2, 70_000, generator=seeded(2), dtype=torch.float64)
    sketch = Sketch(seed=4).sketch
    combined = 0.3 * sketch([x_N]) + 0.7 * sketch([y_N])
    torch.testing.assert_close(sketch([0.3 * x_N + 0.7 * y_N]), combined, rtol=0, atol=1e-11)


def test_the_estimate_is_unbiased_and_as_exact_as_stated() -> None:
    """Over seeds, Ξ̂² averages to Ξ² within its standard error; 95 % of Ξ̂ are within 10 %, and
    the spread is the stated one. Deviations are low-rank and the width of rows is 512.
    """
    tensors = stacked_model(4)
    exact = consensus_distance(tensors)
    sketches = [Sketch(seed=s).sketch_stacked(tensors).numpy() for s in range(100)]
    ratios = np.array([sketch_distance(sketch) for sketch in sketches]) / exact
    stated = float(np.mean([sketch_error(sketch) for sketch in sketches]))
    assert abs(np.mean(ratios**2) - 1) < 3 * 2 * stated / math.sqrt(len(ratios))
    assert np.percentile(np.abs(ratios - 1), 95) < 0.1
    assert 0.6 * stated < np.std(ratios) < 1.4 * stated


@pytest.mark.parametrize("share", [1.0, 0.05], ids=["positive activations", "few activations"])
def test_a_rank_one_difference_is_no_harder_than_stated(share: float) -> None:
    """One outer product, rows alike or columns mostly zero, 512 wide: signs that repeat from block
    to block would be wrong by 30 % on the first, sketches of 512 floats by 15 % on the second.
    """
    rng = seeded(5)
    columns = torch.rand(512, generator=rng) * (torch.rand(512, generator=rng) < share)
    apart_N = (torch.rand(2048, 1, generator=rng) * columns).flatten()
    x_WN = torch.stack([apart_N, -apart_N])
    exact = consensus_distance([x_WN])
    sketches = [Sketch(seed=s).sketch_stacked([x_WN]).numpy() for s in range(30)]
    errors = np.array([sketch_distance(sketch) for sketch in sketches]) / exact - 1
    assert np.sqrt(np.mean(errors**2)) < 1.5 * sketch_error(sketches[0])


def test_close_workers_are_told_apart() -> None:
    """Single precision finds Ξ at 1e-6 of the parameters' length; equal workers have 0."""
    x_N = torch.randn(100_000, generator=seeded(3), dtype=torch.float64)
    apart = 1e-6 * torch.randn(4, 100_000, generator=seeded(4), dtype=torch.float64)
    near_WN = (x_N + apart).float()
    estimate = sketch_distance(Sketch().sketch_stacked([near_WN]).numpy())
    assert estimate == pytest.approx(consensus_distance([near_WN]), rel=0.1)
    equal_WN = x_N.float().expand(4, -1)
    assert sketch_distance(Sketch().sketch_stacked([equal_WN]).numpy()) == 0


def test_signs_are_pinned() -> None:
    """Ranks of different machines and versions draw the same signs: the first ones, by value."""
    sketch = Sketch(size=8, seed=3).sketch([torch.ones(8)])
    assert sketch.tolist() == [1, 1, 1, -1, 1, -1, -1, -1]
    assert not torch.equal(sketch, Sketch(size=8, seed=4).sketch([torch.ones(8)]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Sketch(size=0), "size of at least 1"),
        (lambda: Sketch(seed=-1), "seed of at least 0"),
        (lambda: Sketch().sketch([torch.arange(4)]), "floating-point"),
    ],
)
def test_bad_sketches_are_refused(make: Callable[[], object], reason: str) -> None:
    """The error says what is required."""
    with pytest.raises(UserError, match=reason):
        make()
