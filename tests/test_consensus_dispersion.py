from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.consensus import dispersion, tensor_norms
from gossamer.consensus.dispersion import gini
from gossamer.errors import UserError

norms = st.lists(st.floats(0, 1e6), min_size=1, max_size=40).map(np.array)


@given(norms)
def test_gini_equals_its_double_sum(a_W: np.ndarray) -> None:
    """The sorted form in n log n equals Σ|a_i − a_j| / (2n²μ)."""
    pairs = np.abs(a_W[:, None] - a_W).sum()
    expected = pairs / (2 * len(a_W) ** 2 * a_W.mean()) if a_W.sum() > 0 else 0.0
    assert gini(a_W) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_measures_of_known_norms() -> None:
    """σ²/μ, σ/μ and the quartiles of 1..5, by hand: μ = 3, σ² = 2, Q1 = 2, Q3 = 4."""
    got = dispersion([1.0, 2.0, 3.0, 4.0, 5.0])
    assert got.gini == pytest.approx(40 / (2 * 25 * 3))
    assert got.index_of_dispersion == pytest.approx(2 / 3)
    assert got.coefficient_of_variation == pytest.approx(np.sqrt(2) / 3)
    assert got.quartile_coefficient == pytest.approx(2 / 6)


@given(norms, st.floats(1e-3, 1e3))
def test_only_the_index_of_dispersion_has_a_unit(a_W: np.ndarray, scale: float) -> None:
    """Norms in another unit change σ²/μ in proportion, and the other three not at all."""
    one, other = dispersion(a_W), dispersion(scale * a_W)
    assert other.index_of_dispersion == pytest.approx(scale * one.index_of_dispersion, abs=1e-6)
    for name in ("gini", "coefficient_of_variation", "quartile_coefficient"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("a_W", [[0.0, 0.0, 0.0], [5.0], [0.1] * 7])
def test_equal_replicas_have_no_dispersion(a_W: list[float]) -> None:
    """All zero, one worker, and equal norms are not unequal, to rounding error."""
    assert np.max(np.abs(dispersion(a_W))) < 1e-15


def test_all_tensors_at_once() -> None:
    """[T, W] gives for each tensor what [W] of that tensor gives; a tensor of zeros is one."""
    a_TW = np.random.default_rng(0).random((4, 9))
    a_TW[2] = 0
    got = dispersion(a_TW)
    for tensor, a_W in enumerate(a_TW):
        for all_tensors, one in zip(got, dispersion(a_W), strict=True):
            assert all_tensors[tensor] == one


def test_a_diverged_replica_is_not_hidden() -> None:
    """A norm that is not a number makes every measure one."""
    assert np.all(np.isnan(dispersion([1.0, np.nan, 2.0])))


def test_ranks_and_simulator_measure_the_same_norms() -> None:
    """Norms of single workers, gathered, are the bits that stacked tensors give."""
    tensors = [torch.randn(6, 7, 5), torch.randn(6, 3).bfloat16()]
    ranks = [tensor_norms([t[rank].unsqueeze(0) for t in tensors]) for rank in range(6)]
    np.testing.assert_array_equal(np.concatenate(ranks, axis=1), tensor_norms(tensors))
    expected = [[np.linalg.norm(row.double()) for row in tensor] for tensor in tensors]
    np.testing.assert_allclose(tensor_norms(tensors), expected)


@pytest.mark.parametrize("bad", [[], 3.0, [1.0, -1.0]])
def test_what_is_not_a_set_of_norms_is_refused(bad: object) -> None:
    """No workers, no axis of workers, and negative norms: the error says what to give."""
    with pytest.raises(UserError, match=r"give an array|pass the L2 norm"):
        dispersion(bad)  # pyright: ignore[reportArgumentType]
