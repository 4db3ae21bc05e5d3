"""Results that are kept: what is known of a run besides its result, and what follows from it."""

from __future__ import annotations

import math
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from benchmarks import evidence, findings
from benchmarks.claims import claims, observed
from gossamer.bench.analysis import analyse
from gossamer.errors import UserError
from tests.stories import LOG_EVERY, NUM_STEPS, spec_of, story_of, write

GRAPHS = ("D_ring", "D_torus", "D_hypercube", "D_lattice(k=6)", "D_random_regular(k=3)", "D_star")


def test_observations_of_kept_results_are_those_of_the_records(tmp_path: Path) -> None:
    """Six graphs at two scales, two seeds: the same correlations, p-values and intervals follow
    from one row per run as from all records, and a table says them.
    """
    stories = [
        story_of(
            spec_of(graph, workers, seed),
            0.8 + 0.02 * place + 0.01 * seed + 0.003 * (place * workers % 5),
            spread=0.5 / (1 + (place + workers) % 4),
        )
        for place, graph in enumerate(GRAPHS)
        for workers in (16, 64)
        for seed in (0, 1)
    ]
    write(tmp_path / "runs", stories, "of no matter")
    results = evidence.read(tmp_path / "runs")
    kept = [(run.spec, run.final, run.facts) for run in results if run.final is not None]
    found, expected = observed(kept), analyse(stories).observations
    keys = ["observation", "workers", "method", "phase", "measure"]
    assert len(found) == len(expected) > 0
    # What could have been seen is estimated by draws, which follow the order of rows.
    found, expected = (frame.sort(keys).drop("detectable") for frame in (found, expected))
    assert_frame_equal(found, expected, rel_tol=1e-5)
    assert "| connections | digits-mlp | all | 6 |" in claims(kept)
    evidence.write(results, tmp_path / "kept.csv")
    facts = pl.read_csv(tmp_path / "kept.csv")
    assert facts["megabytes"].unique().to_list() == [0.06]
    ring = facts.filter(pl.col("method") == "D_ring")
    assert ring["connections"].unique().to_list() == [2]


def test_wire_formats_of_two_graphs_give_no_verdict() -> None:
    """The kept results of nine methods on two graphs: no table of observations is printed."""
    path = Path(__file__).parents[1] / "evidence" / "wire-stdlib-gpt.csv"
    kept = [(run.spec, run.final, run.facts) for run in evidence.read(path) if run.final]
    assert len({spec.method for spec, _, _ in kept}) == 9
    found = observed(kept).filter(pl.col("observation") == "connections")
    assert found["units"].unique().to_list() == [2]
    assert claims(kept) == ""


def test_distances_and_targets_of_controlled_runs_are_kept(tmp_path: Path) -> None:
    """Of other runs nothing is; a folder of those alone is refused."""
    controlled = spec_of("D_ring", control="constant(c=0.5)", log_every=1)
    write(tmp_path / "runs", [story_of(controlled, 0.8), story_of(spec_of("D_ring"), 0.8)])
    evidence.write_steps(tmp_path / "runs", tmp_path / "steps.csv")
    kept = pl.read_csv(tmp_path / "steps.csv")
    assert kept.columns == ["method", "seed", "step", "lr", "distance", "target"]
    assert kept["step"].to_list() == list(range(LOG_EVERY, NUM_STEPS + 1, LOG_EVERY))
    write(tmp_path / "plain", [story_of(spec_of("D_ring"), 0.8)])
    with pytest.raises(UserError, match="needs runs with a control, got none"):
        evidence.write_steps(tmp_path / "plain", tmp_path / "none.csv")


def test_figures_have_a_point_for_each_method_and_setting() -> None:
    """Differences and connections of two scales and six graphs; a Γ beside the run that has it."""
    results = [
        evidence.Result(
            spec_of(method, workers, seed),
            0.9 - 0.01 * place + 0.001 * seed * place,
            "",
            "",
            {"connections": float(place)},
        )
        for place, method in enumerate(("C_complete", *GRAPHS))
        for workers in (16, 64)
        for seed in (0, 1)
    ]
    rows, axes = evidence.compare(results), evidence.varied(results)
    drawn = findings.differences(rows, axes, "digits", "all-reduce")
    assert [len(trace.x) for trace in drawn.data] == [6, 6]
    assert sorted(drawn.data[0].x, reverse=True) == pytest.approx(
        [-0.0095 * place for place in range(1, 7)]
    )
    drawn = findings.connections(results, "digits")
    assert [sorted(trace.x) for trace in drawn.data] == [[2, 3, 4, 5, 6, 7]] * 2
    steps = pl.DataFrame({"step": [1, 2], "distance": [1.0, 2.0], "target": [math.inf, 3e6]})
    named = steps.with_columns(method=pl.lit("ring beside Γ"), seed=0)
    ring, gamma = findings.distances(named, "digits").data
    assert (list(ring.y), list(gamma.x), list(gamma.y)) == ([1, 2], [2], [3])
