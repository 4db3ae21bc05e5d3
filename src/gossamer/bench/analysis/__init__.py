"""Compute the tables of a report from records: pure functions without files or figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import polars as pl

from gossamer.bench.analysis.comparison import (
    crossovers,
    differences,
    summary,
    verdicts,
)
from gossamer.bench.analysis.graphs import repeats
from gossamer.bench.analysis.links import NO_LINKS
from gossamer.bench.analysis.observations import (
    PHASES,
    fits,
    graph_ranks,
    observations,
    phase_dispersion,
    run_dispersion,
)
from gossamer.bench.analysis.tabulate import MEASURES, Tables, join, rows_of, tabulate
from gossamer.bench.analysis.targets import profiles, scores
from gossamer.bench.analysis.targets import targets as target_costs
from gossamer.bench.analysis.timed import timed
from gossamer.bench.analysis.tuned import sensitivity, tuning
from gossamer.bench.clock import Clock
from gossamer.bench.store import Story

__all__ = ["MEASURES", "PHASES", "Analysis", "Tables", "analyse", "analyse_tables", "tabulate"]


class Analysis(NamedTuple):
    """All tables of a report."""

    runs: pl.DataFrame
    steps: pl.DataFrame
    evaluations: pl.DataFrame
    dispersion: pl.DataFrame
    trials: pl.DataFrame
    """Trials of learning rates; only ``sensitivity`` and ``tuning`` use them."""

    dispersion_by_phase: pl.DataFrame
    """One row per run, phase and tensor."""

    dispersion_by_run: pl.DataFrame
    """One row per run and phase: the mean over tensors."""

    summary: pl.DataFrame
    differences: pl.DataFrame
    verdicts: pl.DataFrame
    observations: pl.DataFrame
    fits: pl.DataFrame
    graph_ranks: pl.DataFrame
    crossovers: pl.DataFrame
    sensitivity: pl.DataFrame
    """One row per tuned method and learning rate."""

    tuning: pl.DataFrame
    repeats: pl.DataFrame
    """Methods whose trajectory equals that of another bit for bit; the tests count them once."""

    targets: pl.DataFrame
    """The cost of methods to reach the target."""

    profiles: pl.DataFrame
    """Performance profiles over all settings."""

    scores: pl.DataFrame
    """Summaries of the profiles."""

    links: pl.DataFrame
    """Modelled seconds to the target on each link, if there are several."""

    @property
    def all_runs(self) -> pl.DataFrame:
        """The runs that are compared, and the trials."""
        return pl.concat([self.runs, self.trials])


def analyse(
    stories: Iterable[Story],
    clock: Clock | None = None,
    targets: Mapping[str, float] | None = None,
) -> Analysis:
    """Return all tables of an experiment; method names are those in the records.

    Args:
        stories: its runs.
        clock: predicts modelled seconds, one of ``clock.make_clocks``.
        targets: by workload; they replace the workloads' own.
    """
    rows = [timed(rows, clock) for story in stories if (rows := rows_of(story))]
    return analyse_tables(join(rows, {}, targets))


def analyse_tables(measured: Tables, links: pl.DataFrame = NO_LINKS) -> Analysis:
    """Return all tables that follow from the measured ones.

    Args:
        measured: as ``join`` returns it.
        links: as ``on_links`` returns it.
    """
    runs = measured.runs
    repeated = repeats(runs)
    of_phases = phase_dispersion(measured)
    of_runs = run_dispersion(of_phases)
    results, gaps = summary(runs), differences(runs, repeated)
    curves, reached = sensitivity(measured.trials), target_costs(runs)
    return Analysis(
        *measured,
        of_phases,
        of_runs,
        results,
        gaps,
        verdicts(runs, results, gaps),
        observations(runs, of_runs, repeated),
        fits(runs, of_runs),
        graph_ranks(runs, of_phases),
        crossovers(measured),
        curves,
        tuning(curves, results),
        repeated,
        reached,
        profiles(reached),
        scores(reached),
        links,
    )
