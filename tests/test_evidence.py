"""Results that are kept: what is known of a run besides its result, and what follows from it."""

from __future__ import annotations

import math
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from benchmarks import again, evidence, findings
from benchmarks.claims import claims, observed, of_fewer
from benchmarks.claims import tested as only_tested
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
    kept = evidence.kept(results)
    found, expected = observed(kept), analyse(stories).observations
    keys = ["observation", "workers", "method", "phase", "measure"]
    assert len(found) == len(expected) > 0
    assert_frame_equal(observed(kept[::-1]), found)
    # What could have been seen is estimated by draws, which follow the order of rows.
    found, expected = (frame.sort(keys).drop("detectable") for frame in (found, expected))
    assert_frame_equal(found, expected, rel_tol=1e-5)
    assert "| connections | digits-mlp | all | 6 |" in claims(kept)
    evidence.write(results, tmp_path / "kept.csv")
    facts = pl.read_csv(tmp_path / "kept.csv")
    assert facts["megabytes"].unique().to_list() == [0.06]
    ring = facts.filter(pl.col("method") == "D_ring")
    assert ring["connections"].unique().to_list() == [2]


def test_fewer_graphs_are_all_choices_that_keep_the_sparsest_and_the_densest() -> None:
    """Quality that rises with connections, but for the densest graph, which is the worst: without
    it every five graphs have ρ = 1, with it none has, and there are four choices of the others.
    """
    quality = {2.0: 0.1, 3.0: 0.2, 4.0: 0.3, 6.0: 0.4, 63.0: 0.5, 64.0: 0.0}
    kept = [
        (spec_of(graph, 64), final, {"connections": connections})
        for graph, (connections, final) in zip(GRAPHS, quality.items(), strict=True)
    ]
    few = of_fewer(kept, 5).splitlines()
    assert few[0].endswith("| highest | p < 0.05 of 4 |")
    observation, _, low, middle, high, seen = few[2].strip("| ").split(" | ")
    assert (observation, low, middle, high, seen) == ("connections", *["+0.00"] * 3, "0 %")
    assert of_fewer(kept, 5, most=2).startswith(few[0].replace("of 4", "of 2 drawn of 4"))
    alike = [(spec, 0.5, facts) for spec, _, facts in kept]
    with pytest.raises(UserError, match="results differ, got none in 4 choices of 5"):
        of_fewer(alike, 5)
    for given, num_graphs in ((kept, 7), ([], 5)):
        with pytest.raises(UserError, match=f"are known, {len(given)}, got {num_graphs}"):
            of_fewer(given, num_graphs)


def test_choices_of_graphs_do_not_follow_the_order_of_rows() -> None:
    """One graph has the fewest connections at 64 workers and the most at 16: its place is that at
    the largest scale, and the same choices are drawn whichever row comes first.
    """
    kept = [
        (spec_of(graph, workers), 0.1 * (place * workers % 7), {"connections": connections})
        for place, graph in enumerate(GRAPHS)
        for workers in (64, 16)
        for connections in [9.0 if (place, workers) == (0, 16) else 2.0 + place]
    ]
    assert of_fewer(kept, 5, most=2) == of_fewer(kept[::-1], 5, most=2)


@pytest.mark.parametrize(
    ("at_one_scale", "seen"),
    [(("D_torus", "D_hypercube"), "50 %"), (("D_ring", "D_star"), "0 %")],
)
def test_choices_of_graphs_that_cannot_be_tested_have_seen_nothing(
    at_one_scale: tuple[str, str], seen: str
) -> None:
    """Quality that rises with connections, and two graphs at one of two scales, which are exchanged
    with each other alone: twelve permutations of five graphs. Two choices of four have both, or
    all.
    """
    kept = [
        (spec_of(graph, workers), 0.1 * place, {"connections": 2.0 + place})
        for place, graph in enumerate(GRAPHS)
        for workers in (16, 64)
        if workers == 64 or graph not in at_one_scale
    ]
    heading, _, row = of_fewer(kept, 5).splitlines()
    assert heading.endswith("| p < 0.05 of 4 |")
    assert row.endswith(f"| +1.00 | +1.00 | +1.00 | {seen} |")


def test_wire_formats_of_two_graphs_give_no_verdict() -> None:
    """The kept results of nine methods on two graphs: no table of observations is printed, and
    fewer of them cannot be chosen.
    """
    path = Path(__file__).parents[1] / "evidence" / "wire-stdlib-gpt.csv"
    kept = evidence.kept(evidence.read(path))
    assert len({spec.method for spec, _, _ in kept}) == 9
    found = observed(kept).filter(pl.col("observation") == "connections")
    assert found["units"].unique().to_list() == [2]
    assert claims(kept) == ""
    with pytest.raises(UserError, match="graphs whose connections are known, 2, got 5"):
        of_fewer(kept, 5)


def test_method_with_one_seed_has_the_noise_of_the_others() -> None:
    """Beside methods with five seeds, whose own differences give their intervals."""
    wobble = (0.0, 0.01, -0.01, 0.004, -0.004)
    results = [
        evidence.Result(spec_of(method, 16, seed), 0.9 - 0.1 * place + own, "", "")
        for place, method in enumerate(("C_complete", "D_ring", "D_torus"))
        for seed, own in enumerate(wobble[place:] + wobble[:place])
        if method != "D_torus" or seed == 0
    ]
    _, ring, torus = evidence.compare(results)
    # Of two methods the noise of one is half the variance of their differences: s / √n beside s.
    assert ring.gap is not None
    assert torus.gap is not None
    assert ring.gap.low is not None
    assert torus.gap.low is not None
    assert torus.gap.mean - torus.gap.low == pytest.approx(
        math.sqrt(5) * (ring.gap.mean - ring.gap.low)
    )


@pytest.mark.parametrize("workload", ["digits-mlp", "stdlib-gpt"])
def test_of_several_all_reduces_the_best_is_the_reference(workload: str) -> None:
    """By the highest mean accuracy, or the lowest mean loss; never a mixture of their seeds."""
    better = 0.02 if workload == "digits-mlp" else -0.02
    results = [
        evidence.Result(spec_of(method, 16, seed, workload=workload), 0.5 + gain, "", "")
        for method, gain in (("C_complete", 0.0), ("C_tuned", better), ("D_ring", 0.0))
        for seed in range(5)
    ]
    gaps = {row.method: row.gap for row in evidence.compare(results)}
    assert gaps["C_tuned"] is None
    for method in ("C_complete", "D_ring"):
        gap = gaps[method]
        assert gap is not None
        expected = -0.02 if workload == "digits-mlp" else 100 * 0.02 / 0.48
        assert gap.mean == pytest.approx(expected)


def test_rates_of_one_method_are_settings() -> None:
    """Unless each method has its own: then they are part of the method."""
    results = [
        evidence.Result(spec_of(method, 16, seed, lr=lr), lr - gain, "", "")
        for method, gain in (("C_complete", 0.0), ("D_ring", 0.01))
        for lr in (0.1, 0.4)
        for seed in range(5)
    ]
    assert evidence.varied(results) == ["lr"]
    rows = evidence.compare(results)
    assert [(row.setting, row.method) for row in rows if row.gap is not None] == [
        ((0.1,), "D_ring"),
        ((0.4,), "D_ring"),
    ]
    assert all(row.gap.mean == pytest.approx(-0.01) for row in rows if row.gap is not None)
    own = [r for r in results if (r.spec.method == "D_ring") == (r.spec.lr == 0.4)]
    assert evidence.varied(own) == []


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
    assert [sorted(trace.x) for trace in drawn.data[:2]] == [[2, 3, 4, 5, 6, 7]] * 2
    kinds = {trace.name: trace.marker.symbol for trace in drawn.data[2:]}
    assert kinds["ring, lattice"] == "circle"
    assert kinds["star"] == "cross"
    assert kinds["random regular"] in drawn.data[0].marker.symbol
    # The largest scale is in one of two settings; fewer steps on more workers are no setting.
    both = [
        result._replace(
            spec=result.spec.model_copy(
                update={"workers": workers, "lr_scaling": rule, "steps_per_epoch": 512 // workers}
            )
        )
        for workers, rule in (
            (16, "linear"),
            (16, "none"),
            (64, "linear"),
            (64, "none"),
            (256, "none"),
        )
        for result in results
        if result.spec.workers == 64
    ]
    drawn = findings.connections(both, "digits")
    assert [note.text for note in drawn.layout.annotations] == [
        "lr_scaling linear",
        "lr_scaling none",
    ]
    legend = [trace.name for trace in drawn.data[:5] if trace.showlegend]
    assert legend == ["16 workers", "64 workers", "256 workers"]
    found = pl.DataFrame(
        [
            {"observation": "dispersion", "workload": name, "workers": scale, **cell}
            for name, scales in (
                ("digits(width=8, pixels=8), iid", (16, 64, None)),
                ("digits, skewed", (16, None)),
            )
            for scale in scales
            for cell in (
                {"phase": "early", "measure": "gini", "rho": -0.9 if scale else -0.5, "p": 0.01},
                {"phase": "late", "measure": "gini", "rho": 0.25, "p": None},
            )
        ],
    )
    (drawn,) = findings.correlations(found, "digits").data
    assert list(drawn.y) == ["digits(width=8, pixels=8)<br>iid", "digits<br>skewed"]
    gini = [[cell for cell in row if cell] for row in drawn.text]
    assert gini == [["-0.50*", "+0.25"], ["-0.50*", "+0.25"]]
    steps = pl.DataFrame({"step": [1, 2], "distance": [1.0, 2.0], "target": [math.inf, 3e6]})
    named = steps.with_columns(method=pl.lit("ring beside Γ"), seed=0)
    ring, gamma = findings.distances(named, "digits").data
    assert (list(ring.y), list(gamma.x), list(gamma.y)) == ([1, 2], [2], [3])


def test_without_connections_or_tested_rows_there_is_no_figure() -> None:
    """Of all-reduce alone, of runs whose connections are not known, and of a single graph; a result
    of nothing at all is still a result.
    """
    central, unknown, ring = (
        evidence.Result(spec_of(method, 16), final, "", "", facts)
        for method, final, facts in (
            ("C_complete", 0.9, {"connections": 15.0}),
            ("D_torus", 0.8, {}),
            ("D_ring", 0.0, {"connections": 2.0}),
        )
    )
    assert findings.connections([central, unknown], "digits") is None
    kept = evidence.kept([central, unknown, ring, ring._replace(final=None)])
    assert [final for _, final, _ in kept] == [0.9, 0.8, 0.0]
    assert findings.correlations(only_tested(observed(kept)), "digits") is None
    drawn = findings.connections([central, unknown, ring], "digits").data[0]
    assert (list(drawn.x), list(drawn.y)) == ([3], [0])


def test_settings_are_pooled_seed_by_seed() -> None:
    """Differences from all-reduce in the same setting, whose mean over settings is a seed's: two
    settings that repeat each other say no more than one.
    """
    results = [
        evidence.Result(spec_of(method, workers, seed, workload="quadratic"), base * factor, "", "")
        for workers, base in ((8, 1.0), (16, 3.0))
        for method, factors in (("C_complete", (1.0, 2.0, 1.0)), ("D_ring", (1.01, 2.06, 1.02)))
        for seed, factor in enumerate(factors)
    ]
    one = [result for result in results if result.spec.workers == 8]
    assert "| D_ring | 1 | 3 | +2.00 % | -0.48 to +4.48 |" in evidence.pooled_table(one)
    assert "| D_ring | 2 | 3 | +2.00 % | -0.48 to +4.48 |" in evidence.pooled_table(results)
    assert "| C_complete | 2 | 3 | -1.95 % |" in evidence.pooled_table(results, "D_ring")


def test_what_cannot_be_pooled_is_refused_or_left_out() -> None:
    """A method without a seed of the reference, none that has one, and metrics beside losses."""
    ring, torus = spec_of("D_ring"), spec_of("D_torus", seed=1)
    alone = [evidence.Result(spec, 0.9, "", "") for spec in (ring, torus)]
    with pytest.raises(UserError, match="seeds of all-reduce in the same setting, got none"):
        evidence.pooled_table(alone)
    beside = [*alone, evidence.Result(spec_of("C_complete"), 0.8, "", "")]
    assert "D_ring" in evidence.pooled_table(beside)
    assert "D_torus" not in evidence.pooled_table(beside)
    loss = evidence.Result(spec_of("D_ring", workload="quadratic"), 0.1, "", "")
    with pytest.raises(UserError, match="settings of one kind, got losses"):
        evidence.pooled_table([*beside, loss])
    with pytest.raises(UserError, match="got --field or --graphs"):
        evidence.main([Path("digits.csv")], field=["wire"], pooled=True)


def test_methods_are_in_the_order_of_their_dispersion() -> None:
    """Means over seeds, by setting; runs whose norms were not recorded are left out."""
    phases = ("early", "middle", "late")
    results = [
        evidence.Result(
            spec_of(method, 16, seed),
            0.9,
            "",
            "",
            {f"{phase} coefficient_of_variation": spread + seed for phase in phases},
        )
        for method, spread in (("D_ring", 3.0), ("D_torus", 1.0))
        for seed in (0, 1)
    ]
    table = evidence.dispersion_table([*results, evidence.Result(spec_of("D_star"), 0.9, "", "")])
    assert table.splitlines()[2:] == [
        "| D_torus | 1.5 | 1.5 | 1.5 |",
        "| D_ring | 3.5 | 3.5 | 3.5 |",
    ]
    with pytest.raises(UserError, match="--dispersion needs runs whose norms were recorded"):
        evidence.dispersion_table(results[:0])


def test_a_run_without_a_result_adds_no_column() -> None:
    """Of a setting in which all runs diverged nothing is said."""
    results = [
        evidence.Result(spec_of(method, 16), 0.9, "", "") for method in ("C_complete", "D_ring")
    ]
    diverged = evidence.Result(spec_of("D_ring", 64), None, "", "")
    assert evidence.table([*results, diverged]) == evidence.table(results)


def test_a_run_in_two_files_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of several experiments are compared together; writing takes one of them."""
    own = Path(evidence.__file__).parents[1] / "evidence" / "adam-stdlib-gpt-long.csv"
    evidence.main([own, own], pooled=True)
    assert "| gossip, AdamW | 1 | 5 | +1.33 %" in capsys.readouterr().out
    with pytest.raises(UserError, match="--out and --steps need one folder or file, got 2"):
        evidence.main([own, own], out=tmp_path / "out.csv")


def test_a_run_again_has_the_result_that_was_kept() -> None:
    """What is kept of a run is what running it again gives; another result is told apart."""
    spec = spec_of("D_ring", 4, epochs=1, steps_per_epoch=2)
    now = again.result_of(spec)
    assert now is not None
    kept = evidence.Result(spec, now, "abc", "2026-11-20")
    assert not again.differs(kept, again.result_of(spec))
    edited = kept._replace(final=2 * now)
    assert (
        again.row(Path("digits.csv"), [kept, edited], [now, now]) == "| digits | 2 | 1 | 5.0e-01 |"
    )
    assert len(again.draw([kept, edited], 3, seed=0)) == 2
    with pytest.raises(UserError, match="evidence, got results"):
        again.main([Path("results")])
