from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from gossamer import workloads
from gossamer.bench.analysis import MEASURES, PHASES, analyse
from gossamer.bench.analysis.statistics import crossings, fit, interval, noise, p_value
from gossamer.bench.analysis.tabulate import tabulate
from gossamer.bench.clock import Clock
from gossamer.bench.store import Story
from gossamer.records import Evaluation, Started
from gossamer.workloads import Workload
from tests.stories import NUM_STEPS, spec_of, story_of

GRAPHS = {
    "D_ring": 0.4,
    "D_torus": 0.2,
    "D_lattice(k=6)": 0.15,
    "D_lattice(k=8)": 0.1,
    "D_lattice(k=20)": 0.08,
    "D_complete": 0.05,
}
"""Methods in the order of their connections, with dispersions in the reversed order."""


@pytest.fixture
def perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits workload with a metric for which lower is better."""
    made: Callable[[], Workload] = workloads.WORKLOADS["digits-mlp"]
    worse = replace(made(), metric_name="perplexity", higher_is_better=False, target=50.0)
    monkeypatch.setitem(workloads.WORKLOADS, "digits-mlp", lambda: worse)


def paper_like(seeds: int = 3, scales: tuple[int, ...] = (36, 64, 100)) -> list[Story]:
    """More connections: better. More workers: worse. Ranks within a scale are never tied."""
    return [
        story_of(
            spec_of(method, workers, seed),
            0.9 + 0.01 * place - 0.001 * workers + 0.0001 * seed,
            spread=spread - 0.001 * seed,
        )
        for workers in scales
        for seed in range(seeds)
        for place, (method, spread) in enumerate(GRAPHS.items())
    ]


def one(frame: pl.DataFrame, **values: Any) -> dict[str, Any]:
    """Return the only row with these values, where None is null."""
    for name, value in values.items():
        frame = frame.filter(pl.col(name).is_null() if value is None else pl.col(name) == value)
    return frame.row(0, named=True) if len(frame) == 1 else pytest.fail(f"{frame}")


# - Statistics


def test_intervals_are_students() -> None:
    """Mean 10, deviation 1, n 4: ± 3.182 × 1 / 2. One value has no interval."""
    values = np.array([-1, -1, 1, 1]) * math.sqrt(3 / 4) + 10
    mean, low, high, runs = interval(values)
    assert (mean, runs) == (pytest.approx(10), 4)
    assert high == pytest.approx(10 + 3.182446 / 2, rel=1e-6)
    assert low == pytest.approx(10 - 3.182446 / 2, rel=1e-6)
    assert interval([3.0]) == (3.0, None, None, 1)


def test_p_agrees_with_the_interval_and_is_rarely_small_without_a_difference() -> None:
    """Null simulation: eleven methods and three seeds, with the luck of each seed; of 1,000
    differences with the noise of all methods 5 % have p < 0.05, within three standard errors, and
    these are those whose interval excludes 0.
    """
    rng = np.random.default_rng(0)
    small = 0
    for _ in range(1000):
        results = rng.normal(size=(11, 3)) + 2 * rng.normal(size=3)
        gap, known = results[1] - results[0], noise(results)
        found, p = interval(gap, known), p_value(gap, known)
        assert p is not None
        assert found.low is not None
        assert found.high is not None
        assert (p < 0.05) == (found.low > 0 or found.high < 0)
        small += p < 0.05
    assert abs(small / 1000 - 0.05) < 3 * math.sqrt(0.05 * 0.95 / 1000)
    assert p_value([3.0]) is None
    assert (p_value([0.0, 0.0]), p_value([1.0, 1.0])) == (1, 0)


def test_fits_and_crossings_of_lines() -> None:
    """The line 2 − 3x is found; it crosses x at 1/2; curves that do not overlap never cross."""
    x = np.linspace(0, 1, 7)
    line = fit(x, 2 - 3 * x)
    assert line is not None
    assert (line.slope, line.intercept, line.r2) == pytest.approx((-3, 2, 1))
    assert crossings((x, 2 - 3 * x), (x[::2], x[::2])) == pytest.approx([0.5])
    assert crossings(([0, 1], [0, 1]), ([2, 3], [1, 0])) == []
    assert crossings(([0, 1, 2], [1, 0, 1]), ([0, 2], [0, 0])) == []


# - Tables


def test_a_run_is_one_row_with_its_result() -> None:
    """Final, best and replica metrics, and the cost to the target, come from its evaluations."""
    rising = story_of(spec_of("D_ring"), lambda step: {40: 0.95, 50: 0.97}.get(step, step / 70))
    measured = tabulate([rising])
    row = measured.runs.row(0, named=True)
    assert row["final"] == pytest.approx(60 / 70)
    assert (row["best"], row["target_step"], row["target_bytes"]) == (0.97, 40, 40e3)
    assert row["replicas_mean"] == pytest.approx(60 / 70 - 0.02)
    assert row["replicas_worst"] == pytest.approx(60 / 70 - 0.03)
    assert (row["connections"], row["status"]) == (2, "done")
    assert len(measured.steps) == NUM_STEPS / 5
    assert len(measured.evaluations) == NUM_STEPS / 10
    assert len(measured.dispersion) == NUM_STEPS / 5 * 2


def test_a_part_of_the_samples_is_not_compared_with_all() -> None:
    """Final and best use all test samples; the target may be reached, and the lead change, on the
    part of the samples that evaluations during training use. Older records are of the same run.
    """
    cheap = on_a_part(story_of(spec_of("D_ring"), lambda step: 0.1 if step == 60 else step / 50))
    dear = on_a_part(story_of(spec_of("D_torus"), lambda step: step / 100, step_bytes=2e3))
    found = analyse([cheap, dear])
    row = found.runs.row(0, named=True)
    assert (row["final"], row["best"], row["target_step"]) == (0.1, 0.1, 50)
    assert found.evaluations["samples"].to_list()[:6] == [100] * 5 + [None]
    # On the part the ring is ahead to the end: that it has 0.1 on all samples is no crossing.
    assert found.crossovers.is_empty()
    started = cheap.records[0]
    assert isinstance(started, Started)
    before = {name: value for name, value in started.spec.items() if name != "evaluate_samples"}
    old = Story("old", [started.model_copy(update={"spec": before}), *cheap.records[1:]])
    assert set(tabulate([old, cheap]).runs["method"]) == {"D_ring"}


def on_a_part(story: Story) -> Story:
    """Return the run with evaluations on 100 samples, and on all of them at the end."""
    return Story(
        story.run_id,
        [
            record.model_copy(update={"samples": 100})
            if isinstance(record, Evaluation) and record.step < NUM_STEPS
            else record
            for record in story.records
        ],
    )


def test_the_lower_metric_wins_where_lower_is_better(perplexity: None) -> None:
    """Worst, best, target, verdict and the sign of correlations follow the metric."""
    low = {"D_ring": 60.0, "D_exponential": 50.5, "D_complete": 40.0}
    stories = [
        story_of(spec_of(method, 8, seed), value + seed / 10, spread=value)
        for method, value in low.items()
        for seed in range(4)
    ]
    found = analyse(stories)
    ring = one(found.summary, method="D_ring")
    assert ring["replicas_worst"] == pytest.approx(60.14)
    assert [one(found.targets, method=method)["reached"] for method in low] == [0, 0, 4]
    assert one(found.verdicts, workers=8)["winner"] == "D_complete"
    more_is_better = one(found.observations, observation="connections", workers=8)
    assert more_is_better["rho"] > 0


def test_only_runs_that_are_done_count() -> None:
    """A run in progress, or one that diverged, is in the table without a result; one that diverged
    prevents its method from winning.
    """
    stories = [story_of(spec_of("D_ring", 8, seed), 0.8) for seed in range(2)]
    stories.append(story_of(spec_of("D_torus", 8, 0), 0.99))
    stories.append(story_of(spec_of("D_torus", 8, 1), 0.99, status="diverged"))
    stories.append(story_of(spec_of("D_ring", 8, 2), 0.7, status=None))
    found = analyse(stories)
    assert found.runs["status"].value_counts().sort("status")["count"].to_list() == [1, 3, 1]
    ring = one(found.summary, method="D_ring")
    assert (ring["runs"], ring["planned"], ring["final"]) == (2, 3, pytest.approx(0.8))
    assert one(found.summary, method="D_torus")["diverged"] == 1
    assert one(found.verdicts, workers=8)["winner"] == "D_ring"


def test_what_varies_for_every_method_is_no_method() -> None:
    """Two shardings and two batch sizes are four settings, each with its own winner and order;
    what follows from the batch size is not named.
    """
    methods = {"C_complete": 0.9, "D_ring": 0.7, "D_torus": 0.8}
    facets = [("iid", 4), ("iid", 8), ("dirichlet(alpha=0.1)", 4), ("dirichlet(alpha=0.1)", 8)]
    stories = [
        story_of(
            spec_of(m, 16, seed, sharding=sharding, batch_size=size, steps_per_epoch=20 - size),
            value - 0.3 * (sharding != "iid") + 0.2 * (m == "D_ring" and size == 8) + seed / 1000,
        )
        for sharding, size in facets
        for m, value in methods.items()
        for seed in range(2)
    ]
    found = analyse(stories)
    assert set(found.runs["method"]) == {*methods}
    names = [f"digits-mlp, batch_size={size}, sharding={sharding}" for sharding, size in facets]
    won = found.verdicts.select("workload", "winner", "decentralized").sort("workload")
    best = ["D_torus", "D_torus", "D_ring", "D_ring"]
    assert list(won.iter_rows()) == list(zip(sorted(names), ["C_complete"] * 4, best, strict=True))
    pairs = found.differences.select("workload", "method", "other")
    assert len(pairs) == len(pairs.unique()) == 4 * 3 * 2
    for name in names:
        row = one(found.observations, observation="connections", workload=name, workers=16)
        assert row["units"] == 2


def test_a_sharding_is_a_setting_even_where_a_method_sets_it() -> None:
    """The task differs; an optimizer or a rate that a method sets belongs to the method."""
    specs = [
        spec_of("C_complete", 8, sharding="iid"),
        spec_of("D_ring", 8, sharding="dirichlet(alpha=0.1)"),
        spec_of("D_torus", 8, sharding="iid", lr=0.5),
    ]
    runs = tabulate(story_of(spec, 0.5) for spec in specs).runs
    assert runs["facet"].to_list() == [
        "sharding=iid",
        "sharding=dirichlet(alpha=0.1)",
        "sharding=iid",
    ]
    assert runs["method"].to_list() == ["C_complete", "D_ring", "D_torus"]


def test_learning_rates_that_all_methods_try_are_settings() -> None:
    """Each learning rate is a setting, at every scale where it was run."""
    specs = [spec_of("D_ring", 8, lr=0.1), spec_of("D_ring", 8, lr=0.2), spec_of("D_ring", 16)]
    names = tabulate(story_of(spec, 0.5) for spec in specs).runs["workload"].to_list()
    assert names == ["digits-mlp, lr=0.1", "digits-mlp, lr=0.2", "digits-mlp, lr=0.1"]


def test_a_run_on_processes_counts_once() -> None:
    """It repeats the simulated one: it is listed under its own name, and counts once."""
    methods = ["D_ring", "D_exponential", "D_complete"]
    specs = [spec_of(method, 8, 0) for method in methods]
    twin = spec_of("D_ring", 8, 0, engine="distributed")
    found = analyse([story_of(spec, place / 10) for place, spec in enumerate([*specs, twin])])
    assert found.runs["method"].to_list() == [*methods, "D_ring, distributed"]
    row = one(found.observations, observation="connections", workers=8)
    assert (row["units"], row["runs"], row["rho"]) == (3, 3, pytest.approx(1))


def test_connections_of_a_cycle_are_its_mean() -> None:
    """Local SGD averages all 8 workers every tenth step; the logged steps alone would give 7/2."""
    local = spec_of("D_ring", 8, topology="complete", every=10)
    assert tabulate([story_of(local, 0.5)]).runs["connections"].to_list() == [0.7]


# - Observations


def test_the_three_observations_are_found_where_they_hold() -> None:
    """By construction accuracy falls with scale, rises with connections, falls with dispersion. For
    six graphs, or six scales, 2 of 6! orders are as extreme.
    """
    found = analyse(paper_like(scales=(36, 48, 64, 80, 100, 120))).observations
    for method in (*GRAPHS, None):
        scale = one(found, observation="scale", method=method)
        assert (scale["rho"], scale["units"]) == (pytest.approx(-1), 6)
        assert scale["p"] == pytest.approx(2 / 720)
    pooled = one(found, observation="connections", workers=None)
    assert (pooled["rho"], pooled["units"], pooled["runs"]) == (pytest.approx(1), 6, 108)
    assert pooled["p"] == pooled["least_p"] == pytest.approx(2 / 720)
    for phase in PHASES:
        for measure in MEASURES:
            named = {"observation": "dispersion", "phase": phase, "measure": measure}
            for workers in (36, 64, 100, None):
                row = one(found, **named, workers=workers)
                assert row["rho"] == pytest.approx(-1)
                assert row["p"] == pytest.approx(2 / 720)


def test_the_effect_is_per_doubling() -> None:
    """Accuracy is 0.5 + 0.01·log2(1 + neighbours) − 0.02·log2(workers): these slopes are found."""
    stories = [
        story_of(
            spec := spec_of(method, workers, seed),
            0.5 + 0.01 * math.log2(1 + spec.schedule.round(0).degree) - 0.02 * math.log2(workers),
        )
        for method in GRAPHS
        for workers in (36, 48, 64, 80, 100)
        for seed in range(2)
    ]
    found = analyse(stories).observations
    row = one(found, observation="connections", workers=None)
    assert row["slope"] == pytest.approx(0.01)
    assert row["slope_low"] <= row["slope"] <= row["slope_high"]
    ring = one(found, observation="scale", method="D_ring")
    assert ring["slope"] == pytest.approx(-0.02)
    assert ring["slope_low"] <= ring["slope"] <= ring["slope_high"]


def test_fewer_than_five_graphs_have_no_p() -> None:
    """Three graphs at three scales with nine seeds are three units: no p, and the row says that
    none of their 3! orders has one below 1/3.
    """
    few = {"D_ring": 0.7, "D_torus": 0.8, "D_complete": 0.9}
    stories = [
        story_of(spec_of(method, workers, seed), value + seed / 1000, spread=1 - value)
        for method, value in few.items()
        for workers in (36, 64, 100)
        for seed in range(9)
    ]
    found = analyse(stories).observations
    for observation in ("connections", "dispersion"):
        for row in found.filter(pl.col("observation") == observation).iter_rows(named=True):
            assert (abs(row["rho"]), row["p"], row["units"]) == (pytest.approx(1), None, 3)
            assert row["least_p"] == pytest.approx(1 / 3)
            assert "3 graphs: not even a perfect order has a p below 0.33" in row["note"]


def test_a_seed_that_not_all_graphs_have_is_left_out() -> None:
    """Seed 2 is 0.5 better, and only the ring has it: the ring is still the worst graph."""
    stories = [
        story_of(spec_of(method, 64, seed), 0.8 + place / 100 + 0.5 * (seed == 2))
        for place, method in enumerate(GRAPHS)
        for seed in range(3 if method == "D_ring" else 2)
    ]
    row = one(analyse(stories).observations, observation="connections", workers=64)
    assert (row["rho"], row["runs"]) == (pytest.approx(1), 12)


def test_a_metric_that_is_no_number_is_in_no_order() -> None:
    """One graph ends with NaN: the other five are tested as if it were absent."""
    six = {name: 0.8 + place / 100 for place, name in enumerate(GRAPHS)}
    five = analyse([story_of(spec_of(n, 64), v) for n, v in six.items() if n != "D_torus"])
    with_nan = six | {"D_torus": math.nan}
    found = analyse([story_of(spec_of(n, 64), v) for n, v in with_nan.items()])
    assert found.observations.filter(workers=64).equals(five.observations.filter(workers=64))
    assert one(found.observations, observation="connections", workers=64)["units"] == 5


def test_the_same_trajectory_counts_once() -> None:
    """Two spellings of the ring have the same records, bit for bit: they are named, count as one
    graph, and do not enter the noise twice.
    """
    runs = {name: place / 100 for place, name in enumerate(GRAPHS)}

    def stories(names: dict[str, float]) -> list[Story]:
        return [
            story_of(spec_of(name, 64, seed), 0.8 + value + seed * value, spread=1 - value)
            for name, value in names.items()
            for seed in range(2)
        ]

    apart, twice = analyse(stories(runs)), analyse(stories(runs | {"D_lattice(k=2)": 0.0}))
    assert apart.repeats.is_empty()
    assert one(twice.repeats, workers=64) == {
        "workload": "digits-mlp",
        "workers": 64,
        "method": "D_lattice(k=2)",
        "same_as": "D_ring",
    }
    assert apart.observations.equals(twice.observations)
    pair = {"method": "D_torus", "other": "D_ring"}
    assert one(apart.differences, **pair) == one(twice.differences, **pair)
    # One digit of one record makes another trajectory.
    other = story_of(spec_of("D_lattice(k=2)", 64, 1), 0.8 + 1e-12, spread=1.0)
    assert analyse([*stories(runs | {"D_lattice(k=2)": 0.0})[:-1], other]).repeats.is_empty()


def test_graphs_are_compared_where_nothing_else_differs() -> None:
    """Five graphs with momentum, and two with Adam, which are far ahead: the smaller variant is
    left out, and the test is that of the five alone.
    """
    five = list(GRAPHS)[:5]
    stories = [
        story_of(spec_of(method, 64, seed), 0.8 + place / 100)
        for place, method in enumerate(five)
        for seed in range(2)
    ]
    alone = analyse(stories)
    adam = {"optimizer": "adamw", "optimizer_options": {}}
    for name, graph in (("Adam, ring", "D_ring"), ("Adam, own", "D_lattice(k=10)")):
        spec = spec_of(graph, 64, 0, **adam)
        stories.append(story_of(spec.model_copy(update={"method": name}), 0.99, spread=len(name)))
    found = analyse(stories)
    assert found.runs["graph"].unique(maintain_order=True).to_list() == [*five, "Adam, own"]
    of_graphs = pl.col("observation") != "scale"
    assert found.observations.filter(of_graphs).equals(alone.observations.filter(of_graphs))
    assert one(found.observations, observation="connections", workers=None)["units"] == 5


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("wire", ("bf16", "modulo(bits=8)", "modulo(bits=4)")),
        ("fragments", (2, 3, 4)),
        ("algorithm", ("awc", "gradient_tracking", "exact_diffusion")),
        ("control", ("constant(c=0.5)", "constant(c=0.25)", "auto")),
        ("every", (2, 4, 8)),
        ("gossip_steps", (2, 3, 4)),
        ("optimizer", ("sgd(momentum=0.1)", "sgd(momentum=0.2)", "sgd(momentum=0.3)")),
    ],
)
def test_variants_of_a_graph_are_not_graphs(field: str, values: tuple[Any, ...]) -> None:
    """Two graphs, each plain and with three values of another setting: eight methods, but two
    graphs, which is too few for a verdict.
    """
    stories: list[Story] = []
    for place, graph in enumerate(("D_ring", "D_lattice(k=6)")):
        for number, value in enumerate((None, *values)):
            spec = spec_of(graph, 16, **({} if value is None else {field: value}))
            spec = spec.model_copy(update={"method": f"{graph}, {number}"})
            quality = 0.7 + 0.1 * place + 0.01 * number
            stories.append(story_of(spec, quality, spread=1 - quality))
    found = analyse(stories)
    named = found.runs["graph"].unique(maintain_order=True).to_list()
    assert named == ["D_ring, 0", "D_lattice(k=6), 0"]
    for observation in ("connections", "dispersion"):
        rows = found.observations.filter(pl.col("observation") == observation)
        assert rows["units"].unique().to_list() == [2]
        assert rows["p"].null_count() == len(rows) > 0


def test_a_field_that_older_records_lack_makes_no_variant() -> None:
    """Two of five graphs have records from before wire formats: they are five graphs."""
    stories = [story_of(spec_of(graph, 64), 0.8 + p / 100) for p, graph in enumerate(GRAPHS)][:5]
    for story in stories[:2]:
        started = story.records[0]
        assert isinstance(started, Started)
        spec = {k: v for k, v in started.spec.items() if k not in ("wire", "fragments")}
        story.records[0] = started.model_copy(update={"spec": spec})
    row = one(analyse(stories).observations, observation="connections", workers=64)
    assert (row["units"], row["rho"]) == (5, pytest.approx(1))


def test_equally_large_variants_are_strata() -> None:
    """Five graphs in full precision, in the order of their neighbours, and in 8 bits without an
    order: five graphs, two strata, and by hand ρ = (10 + 0) / 20.
    """
    few_bits = (0.64, 0.63, 0.62, 0.61, 0.65)
    stories: list[Story] = []
    for place, graph in enumerate(list(GRAPHS)[:5]):
        stories.append(story_of(spec_of(graph, 64), 0.8 + place / 100))
        spec = spec_of(graph, 64, wire="modulo(bits=8)")
        spec = spec.model_copy(update={"method": f"{graph}, 8 bits"})
        stories.append(story_of(spec, few_bits[place]))
    row = one(analyse(stories).observations, observation="connections", workers=64)
    assert (row["units"], row["rho"]) == (5, pytest.approx(0.5))


def test_phases_are_thirds_of_training() -> None:
    """A dispersion of 1 in the first 20 of 60 steps and 0 after is early alone."""
    story = story_of(spec_of("D_ring"), 0.5, spread=1.0)
    quiet = story_of(spec_of("D_ring"), 0.5, spread=0.0)
    mixed = [
        early if getattr(early, "step", 0) <= 20 else late
        for early, late in zip(story.records, quiet.records, strict=True)
    ]
    found = analyse([Story(story.run_id, mixed)]).dispersion_by_phase
    assert one(found, phase="early", tensor="0.weight")["gini"] == 1
    assert one(found, phase="middle", tensor="0.weight")["gini"] == 0
    assert one(found, phase="late", tensor="0.bias")["gini"] == 0


def test_the_fit_is_through_the_points() -> None:
    """Accuracy = 0.5 − 0.1·log10(dispersion), with both tensors' geometric mean √2·spread."""
    stories = [
        story_of(spec_of("D_ring", 8, seed), 0.5 - 0.1 * seed, spread=10.0**seed)
        for seed in range(4)
    ]
    line = one(analyse(stories).fits, phase="early", measure="gini")
    assert line["slope"] == pytest.approx(-0.1)
    assert line["intercept"] == pytest.approx(0.5 + 0.1 * math.log10(math.sqrt(2)))
    assert line["x_high"] == pytest.approx(1000 * math.sqrt(2))


def test_graphs_are_ranked_for_each_tensor() -> None:
    """The complete graph is least dispersed, the ring most, for every tensor and measure."""
    ranks = analyse(paper_like()).graph_ranks
    assert len(ranks) == 3 * 3 * 2 * 4 * 6
    for method, rank in zip(reversed(GRAPHS), range(1, 7), strict=True):
        assert ranks.filter(pl.col("method") == method)["rank"].unique().to_list() == [rank]


# - Verdicts


def test_the_verdict_knows_what_is_level_and_what_is_cheap() -> None:
    """B is ahead of A by 0.001 ± 0.003 and of C by 0.1: A is level, costs half, C is neither."""
    runs = {"D_ring": (0.0, 1e3), "D_torus": (0.001, 2e3), "D_complete": (-0.1, 1e2)}
    noise = [0.0, 0.002, -0.002]
    stories = [
        story_of(spec_of(m, 16, seed), 0.9 + gap + noise[seed] * (m == "D_ring"), step_bytes=cost)
        for m, (gap, cost) in runs.items()
        for seed in range(3)
    ]
    found = analyse(stories)
    row = one(found.verdicts, workers=16)
    assert (row["winner"], row["level"], row["cheapest"]) == ("D_torus", ["D_ring"], "D_ring")
    assert row["cheapest_bytes"] / row["winner_bytes"] == 0.5
    gap = one(found.differences, method="D_torus", other="D_ring")
    # By hand: residuals of 2/3 of A's noise and −1/3 of it in B and C, 4 degrees of freedom.
    variance = (4 + 1 + 1) / 9 * 2 * 0.002**2 / 4
    half = 2.776445 * math.sqrt(2 * variance / 3)
    assert gap["better"] == pytest.approx(0.001)
    assert gap["better_low"] == pytest.approx(0.001 - half)


def test_one_seed_tells_nothing_apart() -> None:
    """There is a winner, and no statement about methods that are level with it."""
    row = one(analyse(paper_like(seeds=1)).verdicts, workers=36)
    assert (row["winner"], row["level"], row["final_low"]) == ("D_complete", None, None)


def test_the_verdict_compares_with_centralized_training() -> None:
    """The best decentralized method is 0.02 behind, in all three seeds."""
    stories = [
        story_of(spec_of(method, 8, seed), value + seed / 100)
        for method, value in {"C_complete": 0.9, "D_ring": 0.8, "D_torus": 0.88}.items()
        for seed in range(3)
    ]
    row = one(analyse(stories).verdicts, workers=8)
    assert (row["winner"], row["decentralized"]) == ("C_complete", "D_torus")
    assert row["better"] == pytest.approx(-0.02)
    assert row["better_high"] == pytest.approx(-0.02)


def test_the_crossover_is_where_the_curves_meet() -> None:
    """Cheap: 0.5 + kB/200. Dear, at twice the bytes per step: 0.3 + kB/100. At 40 kB both
    have 0.7.
    """
    cheap = story_of(spec_of("D_ring"), lambda step: 0.5 + step / 200)
    dear = story_of(spec_of("D_torus"), lambda step: 0.3 + 2 * step / 100, step_bytes=2e3)
    row = one(analyse([cheap, dear]).crossovers, axis="bytes_sent")
    assert (row["before"], row["after"], row["count"]) == ("D_ring", "D_torus", 1)
    assert row["at"] == pytest.approx(40e3)


def test_crossovers_in_seconds_are_not_the_simulator_s() -> None:
    """Measured ones on processes: 0.7 after 40 steps, which take 0.4 s; of simulations modelled
    ones alone.
    """
    curves = {"D_ring": lambda step: 0.5 + step / 200, "D_torus": lambda step: 0.3 + step / 100}

    def axes(engine: str, clock: Clock | None = None) -> dict[str, float]:
        stories = [
            story_of(spec_of(name, 9, engine=engine), curve) for name, curve in curves.items()
        ]
        return dict(analyse(stories, clock).crossovers.select("axis", "at").iter_rows())

    assert axes("simulated") == pytest.approx({"bytes_sent": 40e3})
    assert axes("distributed") == pytest.approx({"bytes_sent": 40e3, "train_s": 0.4})
    clock = Clock("100gbit", compute_s={"digits-mlp": 1.0})
    assert axes("simulated", clock)["modelled_s"] == pytest.approx(40, rel=1e-3)


def test_nothing_gives_empty_tables() -> None:
    """An experiment without runs, or with only damaged files, can be analysed."""
    found = analyse([Story("x", [], "damaged")])
    assert all(len(frame) == 0 for frame in found)
