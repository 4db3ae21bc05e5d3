"""From stories to tables: pure functions, no files and no pictures."""

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
    """Everything a report says, as tables."""

    runs: pl.DataFrame
    steps: pl.DataFrame
    evaluations: pl.DataFrame
    dispersion: pl.DataFrame
    trials: pl.DataFrame
    """Runs that were to find a learning rate; of all others but the last two they are no part."""

    dispersion_by_phase: pl.DataFrame
    """By run, phase and tensor."""

    dispersion_by_run: pl.DataFrame
    """By run and phase, over tensors."""

    summary: pl.DataFrame
    differences: pl.DataFrame
    verdicts: pl.DataFrame
    observations: pl.DataFrame
    fits: pl.DataFrame
    graph_ranks: pl.DataFrame
    crossovers: pl.DataFrame
    sensitivity: pl.DataFrame
    """By method and learning rate, where it was tuned."""

    tuning: pl.DataFrame
    repeats: pl.DataFrame
    """Methods that went through the same as another, bit by bit: they are no further witnesses."""

    targets: pl.DataFrame
    """What methods spend to reach the target."""

    profiles: pl.DataFrame
    """Over all settings, in how many a method is how near to the one that spends least."""

    scores: pl.DataFrame
    """Of profiles."""

    links: pl.DataFrame
    """Modelled seconds to the target on each link, where there are several."""

    @property
    def all_runs(self) -> pl.DataFrame:
        """What is compared, and trials."""
        return pl.concat([self.runs, self.trials])


def analyse(
    stories: Iterable[Story],
    clock: Clock | None = None,
    targets: Mapping[str, float] | None = None,
) -> Analysis:
    """Return all tables of an experiment; methods are called as the runs' records say.

    Args:
        stories: its runs.
        clock: by which they get modelled seconds, one of ``clock.make_clocks``.
        targets: of workloads, in place of their own.
    """
    rows = [timed(rows, clock) for story in stories if (rows := rows_of(story))]
    return analyse_tables(join(rows, {}, targets))


def analyse_tables(measured: Tables, links: pl.DataFrame = NO_LINKS) -> Analysis:
    """Return all that follows from what was measured.

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
