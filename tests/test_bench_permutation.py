from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from gossamer.bench.analysis import permutation
from gossamer.bench.analysis.permutation import Association, associations, p_values
from gossamer.topology.arrays import FloatArray

NEIGHBOURS = (2, 4, 6, 8, 12, 31)
"""Of six graphs."""

REPEATS = 1000


def one_scale(x: npt.ArrayLike, y: npt.ArrayLike) -> Association:
    """Return the association of y with x over the graphs of one scale."""
    (found,) = associations(range(np.size(x)), [0] * np.size(x), y, np.reshape(x, (-1, 1)))
    return found


def cells(num_graphs: int, num_scales: int) -> tuple[list[int], list[int]]:
    """Return the graph and the scale of each cell, scale by scale."""
    graphs = list(range(num_graphs)) * num_scales
    return graphs, [scale for scale in range(num_scales) for _ in range(num_graphs)]


def family_noise(
    generator: np.random.Generator, num_graphs: int, num_scales: int, own: float = 0.5
) -> FloatArray:
    """Return results with a random effect of each graph at all scales, and noise at each."""
    family = generator.normal(size=num_graphs)
    return (family + own * generator.normal(size=(num_scales, num_graphs))).ravel()


def rho_of(x: FloatArray, y: FloatArray) -> float:
    return float(np.asarray(stats.spearmanr(x, y).statistic))


def rejected(found: Association) -> bool:
    return found.p is not None and found.p <= 0.05


# - The p-value


@pytest.mark.parametrize("tied", [False, True])
def test_the_correlation_is_scipys_and_its_p_is_counted(tied: bool) -> None:
    """At one scale p is the share of 6! orders that are as extreme, also with ties."""
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=6), generator.normal(size=6)
    if tied:
        x[1] = x[0]
    y += x
    found = one_scale(x, y)
    rhos = [abs(rho_of(x, y[list(order)])) for order in itertools.permutations(range(6))]
    assert found.rho == pytest.approx(rho_of(x, y))
    assert found.p == found.p_alone == np.mean([rho >= rhos[0] - 1e-9 for rho in rhos])


def test_one_permutation_is_for_all_scales() -> None:
    """By hand: five graphs at two scales, each permutation of graphs moves both rows at once."""
    generator = np.random.default_rng(2)
    x_SG, y_SG = generator.normal(size=(2, 5)), generator.normal(size=(2, 5))
    (found,) = associations(*cells(5, 2), y_SG.ravel(), x_SG.reshape(-1, 1))
    rx, ry = (stats.rankdata(values, axis=1) - 3 for values in (x_SG, y_SG))
    size = math.sqrt((rx**2).sum() * (ry**2).sum())
    rhos = [(rx * ry[:, order]).sum() / size for order in itertools.permutations(range(5))]
    assert found.rho == pytest.approx(rhos[0])
    assert found.p == pytest.approx(np.mean(np.abs(rhos) >= abs(rhos[0]) - 1e-12))


def test_scales_are_not_compared_with_each_other() -> None:
    """Within each scale more is better; the difference between scales must not hide it."""
    x = np.array([1, 2, 3, 4, 5] * 2, float)
    y = x + np.repeat([100, 0], 5)
    (found,) = associations(*cells(5, 2), y, x[:, None])
    assert (found.rho, found.p, found.slope) == (1, pytest.approx(2 / 120), pytest.approx(1))


def test_graphs_are_exchanged_with_those_that_ran_at_the_same_scales() -> None:
    """Five graphs of which two have no second scale: 3! × 2! permutations, and a perfect order of
    them is reached by one of these, or by the reversed one as well.
    """
    graphs, scales = [0, 1, 2, 3, 4, 0, 1, 2], [0] * 5 + [1] * 3
    x = np.array([1, 2, 3, 4, 5, 1, 2, 3], float)
    (found,) = associations(graphs, scales, x, x[:, None])
    assert (found.rho, found.units) == (1, 5)
    assert found.p is None
    assert found.least_p == pytest.approx(1 / 12)
    assert "5 graphs: not even a perfect order has a p below 0.083" in found.note


@pytest.mark.parametrize(("num", "least"), [(2, 1), (3, 1 / 3), (4, 1 / 12), (5, 1 / 60)])
def test_few_graphs_reach_no_small_p(num: int, least: float) -> None:
    """A perfect order of n graphs has p = 2 / n!; below five there is no p, and a note."""
    found = one_scale(np.arange(num), np.exp(np.arange(num)))
    assert found.least_p == pytest.approx(least)
    assert found.p == (pytest.approx(least) if num >= 5 else None)
    assert bool(found.note) == (num < 5)


def test_what_cannot_be_told_says_why() -> None:
    """One graph has no order; equal quantities or results cannot be correlated."""
    assert "no two graphs can be compared" in one_scale(np.arange(1), np.arange(1)).note
    for x, y in ((np.ones(6), np.arange(6)), (np.arange(6), np.ones(6))):
        assert one_scale(x, y).rho is None
        assert "no variation" in one_scale(x, y).note


def test_random_permutations_give_the_exact_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are too many permutations, 9,999 random ones give nearly the same p, never 0."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=7)
    y = generator.normal(size=7) + x
    exact, perfect = one_scale(x, y), one_scale(x, x)
    monkeypatch.setattr(permutation, "_MOST_EXACT", 1)
    permutation._orders.cache_clear()
    try:
        drawn, least = one_scale(x, y), one_scale(x, x)
    finally:
        permutation._orders.cache_clear()
    assert drawn.p == pytest.approx(exact.p, abs=3 * math.sqrt(0.25 / 9999))
    assert perfect.p == pytest.approx(2 / 5040)
    assert 1 / 10_000 <= (least.p or 0) < 0.002


# - What it gets wrong, and how often


def test_graphs_without_an_effect_are_rarely_found_to_have_one() -> None:
    """Null simulation: results with a shared family effect and nothing to do with connections, at
    three scales. At most 5 % + 3 standard errors are significant: one test, and the smallest p of
    twelve. Permuting each scale by itself, or taking the smallest of twelve as it is, finds far
    more.
    """
    generator = np.random.default_rng(0)
    graphs, scales = cells(len(NEIGHBOURS), 3)
    x = np.log2(1 + np.tile(NEIGHBOURS, 3))
    found: list[tuple[bool, ...]] = []
    for _ in range(REPEATS):
        y = family_noise(generator, len(NEIGHBOURS), 3)
        measures = x[:, None] + generator.normal(size=(len(x), 12))
        single, _ = p_values(graphs, scales, y, x[:, None])
        twelve, alone = p_values(graphs, scales, y, measures)
        by_itself = p_of_each_scale_by_itself(x, y, generator)
        least = (single[0], twelve.min(), alone.min(), by_itself)
        found.append(tuple(p <= 0.05 for p in least))
    single, twelve, uncorrected, by_itself = np.mean(found, axis=0)
    bound = 0.05 + 3 * math.sqrt(0.05 * 0.95 / REPEATS)
    print(f"{single=:.3f} {twelve=:.3f} {uncorrected=:.3f} {by_itself=:.3f} {bound=:.3f}")
    assert max(single, twelve) <= bound
    assert min(uncorrected, by_itself) > 2 * bound


def p_of_each_scale_by_itself(
    x: FloatArray, y: FloatArray, generator: np.random.Generator
) -> float:
    """Return the p of a test that permutes each scale independently, which is not valid here."""
    rx, ry = (stats.rankdata(v.reshape(3, -1), axis=1) - 3.5 for v in (x, y))
    orders = generator.permuted(np.tile(ry, (199, 1, 1)), axis=2)
    as_far = np.abs((orders * rx).sum((1, 2))) >= abs((rx * ry).sum()) - 1e-9
    return float((1 + as_far.sum()) / 200)


def test_the_interval_holds_the_truth_and_agrees_with_p() -> None:
    """With a true slope of 1, 95 % of intervals hold it, but for 3 standard errors; p is at most
    0.05 exactly where the interval does not hold 0.
    """
    generator = np.random.default_rng(4)
    repeats, held = 200, 0
    x = np.log2(1 + np.tile(NEIGHBOURS, 2))
    for _ in range(repeats):
        y = family_noise(generator, len(NEIGHBOURS), 2) + x
        (found,) = associations(*cells(len(NEIGHBOURS), 2), y, x[:, None])
        low, high = found.slope_low or -math.inf, found.slope_high or math.inf
        assert rejected(found) == (low > 0 or high < 0)
        assert low <= (found.slope or 0) <= high
        held += low <= 1 <= high
    assert held / repeats >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / repeats)


@pytest.mark.parametrize("num_scales", [1, 3])
def test_the_stated_effect_is_found_with_the_stated_power(num_scales: int) -> None:
    """A slope as large as the one that is said to be detectable is found in four of five
    experiments, but for 3 standard errors; one of a third of it is not.
    """
    generator = np.random.default_rng(5)
    repeats = 300
    graphs, scales = cells(len(NEIGHBOURS), num_scales)
    x = np.log2(1 + np.tile(NEIGHBOURS, num_scales))

    def noise() -> FloatArray:
        return family_noise(generator, len(NEIGHBOURS), num_scales)

    stated = [associations(graphs, scales, noise(), x[:, None])[0].detectable for _ in range(100)]
    slope = float(np.median([value for value in stated if value is not None]))

    def power(slope: float) -> float:
        p = [p_values(graphs, scales, noise() + slope * x, x[:, None])[0] for _ in range(repeats)]
        return float(np.mean(np.array(p) <= 0.05))

    margin = 3 * math.sqrt(0.8 * 0.2 / repeats)
    assert power(slope) >= 0.8 - margin
    assert power(slope / 3) < 0.8 - margin
