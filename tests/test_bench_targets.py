from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from gossamer.bench import expand
from gossamer.bench.analysis import Analysis, analyse
from gossamer.bench.analysis.targets import profiles, scores, targets
from gossamer.bench.clock import Clock
from gossamer.bench.experiment import parse
from gossamer.bench.report.figures import figures
from gossamer.bench.report.reading import Reader
from gossamer.bench.report.writing import images, write_report
from gossamer.bench.store import Story
from gossamer.errors import UserError
from gossamer.records import Status
from tests.stories import spec_of, story_of, write

TARGET = {"digits-mlp": 0.8}


def reaching(
    method: str,
    at: Sequence[int | None],
    *,
    workers: int = 8,
    step_bytes: float = 1e3,
    status: Status = "done",
) -> list[Story]:
    """Return runs that reach an accuracy of 0.8 at these steps, one per seed; None: never."""
    return [
        story_of(
            spec_of(method, workers, seed),
            lambda step, first=first or 10**9: 0.9 if step >= first else 0.1,
            step_bytes=step_bytes,
            status=status,
        )
        for seed, first in enumerate(at)
    ]


def found_for(analysis: Analysis, method: str) -> dict[str, float]:
    return analysis.targets.filter(method=method).row(0, named=True)


def test_costs_to_the_target_are_medians_over_seeds() -> None:
    """Steps 20, 40 and 60: the median counts, with its bytes and modelled seconds."""
    clock = Clock("1gbit", compute_s={"digits-mlp": 0.5})
    analysis = analyse(reaching("C_complete", [60, 20, 40]), clock, TARGET)
    row = found_for(analysis, "C_complete")
    assert (row["step"], row["bytes_sent"], row["reached"], row["runs"]) == (40, 40e3, 3, 3)
    by_step = dict(analysis.evaluations.select("step", "modelled_s").iter_rows())
    assert row["modelled_s"] == by_step[40] > 20
    assert row["train_s"] is None
    assert row["more_than_step"] is None


def test_a_run_that_never_gets_there_counts_as_more_than_all() -> None:
    """One of three changes the median, two leave only a lower bound: what such a run spent."""
    few, many = reaching("D_ring", [20, None, 40]), reaching("D_torus", [20, None, None])
    analysis = analyse([*few, *many], targets=TARGET)
    ring, torus = (found_for(analysis, name) for name in ("D_ring", "D_torus"))
    assert (ring["step"], ring["reached"], ring["more_than_step"]) == (40, 2, None)
    assert (torus["step"], torus["reached"]) == (None, 1)
    assert (torus["more_than_step"], torus["more_than_bytes_sent"]) == (60, 60e3)


def test_an_even_number_of_seeds_needs_both_in_the_middle() -> None:
    """Two of four reached it: the median is unknown."""
    analysis = analyse(reaching("D_ring", [20, 30, None, None]), targets=TARGET)
    assert found_for(analysis, "D_ring")["step"] is None
    analysis = analyse(reaching("D_ring", [20, 30, 40, None]), targets=TARGET)
    assert found_for(analysis, "D_ring")["step"] == 35


def test_a_run_that_diverged_never_reaches_the_target() -> None:
    """It counts and has no bound; a run in progress does not count."""
    diverged = reaching("D_ring", [10, 10], status="diverged")
    analysis = analyse(diverged, targets=TARGET)
    row = found_for(analysis, "D_ring")
    assert (row["runs"], row["reached"], row["diverged"]) == (2, 0, 2)
    assert (row["step"], row["more_than_step"]) == (None, None)
    going_on = story_of(spec_of("D_ring"), 0.9, status=None)
    assert analyse([going_on], targets=TARGET).targets.is_empty()


def test_the_experiment_s_target_goes_before_the_workload_s() -> None:
    """That of digits-mlp is 0.9; a lower metric may be the better one."""
    stories = reaching("D_ring", [30])
    assert found_for(analyse(stories), "D_ring")["target"] == 0.9
    assert found_for(analyse(stories, targets=TARGET), "D_ring")["target"] == 0.8
    assert analyse(stories, targets=TARGET).runs["target_step"].to_list() == [30]
    loss = spec_of("D_ring", workload="quadratic")
    falling = story_of(loss, lambda step: 1 / step)
    analysis = analyse([falling], targets={"quadratic": 0.04})
    assert found_for(analysis, "D_ring")["step"] == 30
    with pytest.raises(UserError, match="target must name workloads of the experiment"):
        expand(parse(f"target = {{ digits = 0.8 }}\n{TEXT}", "wrong"))


TEXT = """
name = "targets"
workload = "digits-mlp"
workers = [4, 8, 16, 36]
methods = ["C_complete", "D_ring"]
seeds = [0]
run = { epochs = 6, steps_per_epoch = 10, log_every = 5 }
"""


def four_settings() -> list[Story]:
    """C_complete: 10, 10, 20 and 50 steps; D_ring: 20, 10, 10, and never."""
    steps = {4: (10, 20), 8: (10, 10), 16: (20, 10), 36: (50, None)}
    return [
        story
        for workers, both in steps.items()
        for method, at in zip(("C_complete", "D_ring"), both, strict=True)
        for story in reaching(method, [at], workers=workers)
    ]


def test_profiles_are_those_of_dolan_and_more() -> None:
    """Ratios 1, 1, 2, 1 against 2, 1, 1, ∞: shares at each step, and the area up to 4."""
    analysis = analyse(four_settings(), targets=TARGET)
    curves = analysis.profiles.filter(cost="step").select("method", "ratio", "share")
    assert list(curves.iter_rows()) == [
        ("C_complete", 1.0, 0.75),
        ("C_complete", 2.0, 1.0),
        ("D_ring", 1.0, 0.5),
        ("D_ring", 2.0, 0.75),
    ]
    told = analysis.scores.filter(cost="step")
    assert told["settings"].to_list() == [4, 4]
    assert told["best"].to_list() == [0.75, 0.5]
    assert told["solved"].to_list() == [1.0, 0.75]
    assert told["score"].to_list() == pytest.approx([(3 + 2 / 3) / 4, (2 + 2 / 3) / 4])


def test_profiles_compare_what_all_methods_were_run_at() -> None:
    """A setting that one method lacks, or that no method solves, does not count."""
    alone = reaching("C_complete", [10], workers=64)
    hopeless = [s for m in ("C_complete", "D_ring") for s in reaching(m, [None], workers=25)]
    analysis = analyse([*four_settings(), *alone, *hopeless], targets=TARGET)
    assert analysis.profiles.equals(analyse(four_settings(), targets=TARGET).profiles)


def test_runs_on_processes_are_no_methods_of_a_profile_of_simulations() -> None:
    """Their measured seconds are in the table; without simulations they have profiles."""
    specs = [spec_of("D_ring"), spec_of("D_ring", engine="distributed")]
    analysis = analyse([story_of(spec, 0.9) for spec in specs], targets=TARGET)
    real = analysis.targets.filter(engine="distributed")
    assert real["train_s"].to_list() == [0.1]
    assert set(analysis.profiles["method"]) == set(analysis.scores["method"]) == {"D_ring"}
    alone = analyse([story_of(specs[1], 0.9)], targets=TARGET)
    assert "train_s" in alone.profiles["cost"].to_list()


def test_the_report_shows_targets_and_profiles(tmp_path: Path) -> None:
    """Tables, figures, images of all workloads together, and what was not reached."""
    write(tmp_path / "f", four_settings(), f"target = 0.8\n{TEXT}")
    write_report(tmp_path / "f")
    analysis = Reader(tmp_path / "f").read().analysis
    drawn = {figure.name: figure for figure in figures(analysis)}
    steps = [t for t in drawn["target"].traces if t["meta"]["choice"] == {"show": "step"}]
    central, ring, never = steps
    assert (central["x"], central["y"]) == ([4, 8, 16, 36], [10, 10, 20, 50])
    assert (ring["x"], ring["y"]) == ([4, 8, 16], [20, 10, 10])
    assert (never["x"], never["y"]) == ([36], [60])
    assert "not reached" in never["hovertemplate"]
    assert list(drawn["profile"].choices["show"]) == ["bytes_sent", "step"]
    assert "profile" in dict(images(analysis))
    html = (tmp_path / "f" / "report.html").read_text()
    assert "more than 60" in html
    assert "Profiles in numbers" in html


def test_without_a_target_there_is_nothing_to_reach() -> None:
    """No rows, and no figures."""
    empty = targets(analyse(four_settings()).runs.with_columns(target=pl.lit(None, pl.Float64)))
    assert empty.is_empty()
    assert profiles(empty).is_empty()
    assert scores(empty).is_empty()
