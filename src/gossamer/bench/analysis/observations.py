"""The three observations of DBench as statistics, and ranks of graphs.

1. accuracy against scale            for each graph
2. accuracy against connections      at each scale, and over scales with each ranked by itself
3. accuracy against dispersion       the same; for each measure, early, middle and late in training

All are Spearman's rank correlations with final quality: the metric of the averaged model, negated
where lower is better. So a negative one always means that more goes with worse. The units of the
test are graphs (of 1: scales), not runs and not methods: what differs from another method in
anything but the topology is a variant of its graph. Measures and phases of 3 are tested together.

Reference: Xie et al., Scaling up data parallelism (https://arxiv.org/abs/2509.12213).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from gossamer.bench.analysis.graphs import graph_means, largest_variants
from gossamer.bench.analysis.permutation import associations
from gossamer.bench.analysis.statistics import fit
from gossamer.bench.analysis.tabulate import MEASURES, Tables

PHASES = ("early", "middle", "late")
"""Thirds of training, by steps."""

LEAST = 1e-12
"""Smaller dispersions are rounding errors; they are raised to this before the logarithm."""


def phase_dispersion(tables: Tables) -> pl.DataFrame:
    """Return one row per run, phase and tensor: each measure's mean over the steps of the phase."""
    length = tables.runs.select("run_id", last="steps")
    phase = (pl.col("step") - 1) * len(PHASES) // pl.max_horizontal("last", pl.lit(1))
    names = pl.DataFrame({"phase_number": range(len(PHASES)), "phase": PHASES})
    return (
        tables.dispersion.join(length, on="run_id", maintain_order="left")
        .with_columns(phase_number=phase.clip(0, len(PHASES) - 1))
        .group_by(["run_id", "phase_number", "tensor"], maintain_order=True)
        .agg(pl.col(list(MEASURES)).mean())
        .join(names, on="phase_number", maintain_order="left")
        .select("run_id", "phase", "tensor", *MEASURES)
    )


def run_dispersion(of_phases: pl.DataFrame) -> pl.DataFrame:
    """Return one row per run and phase: each measure's geometric mean over tensors.

    Dispersions of tensors differ by orders of magnitude; in a geometric mean all weigh the same.
    """
    mean = pl.col(list(MEASURES)).clip(lower_bound=LEAST).log10().mean()
    return (
        of_phases.group_by(["run_id", "phase"], maintain_order=True)
        .agg(mean)
        .with_columns((10 ** pl.col(list(MEASURES))).name.keep())
    )


def observations(
    runs: pl.DataFrame, dispersion: pl.DataFrame, repeated: pl.DataFrame
) -> pl.DataFrame:
    """Return the tested associations, one row each; ``workers`` is null for all scales together.

    Slopes are changes of quality when the number of workers, a worker's neighbourhood (itself and
    those it receives from per step), or dispersion doubles.

    Args:
        runs: of ``Tables``. Runs on processes that repeat simulated ones are not counted twice.
        dispersion: as ``run_dispersion`` returns it.
        repeated: as ``graphs.repeats`` returns it.
    """
    measured = runs.with_columns(
        doublings=pl.col("workers").log(2),
        neighbourhood=(1 + pl.col("connections")).log(2),
    ).join(_by_phase(dispersion), on="run_id", how="left", maintain_order="left")
    mixing = measured.filter(~pl.col("centralized"))
    rows = _scale(graph_means(measured, repeated, ["doublings"]))
    connections = largest_variants(graph_means(mixing, repeated, ["neighbourhood"]))
    rows += _by_scale(connections, {"neighbourhood": {"observation": "connections"}})
    together = {
        f"{phase} {measure}": {"observation": "dispersion", "phase": phase, "measure": measure}
        for phase in PHASES
        for measure in MEASURES
    }
    dispersed = largest_variants(graph_means(mixing, repeated, list(together)))
    rows += _by_scale(dispersed, together)
    return pl.DataFrame(rows, schema=_OBSERVATION_SCHEMA)


def fits(runs: pl.DataFrame, dispersion: pl.DataFrame) -> pl.DataFrame:
    """Return linear fits of the final metric against log10 dispersion."""
    done = runs.filter(pl.col("final").is_not_null(), ~pl.col("twin"), ~pl.col("centralized"))
    joined = dispersion.join(done, on="run_id", maintain_order="left")
    rows: list[dict[str, Any]] = []
    keys = ["workload", "workers", "phase"]
    for key, group in joined.group_by(keys, maintain_order=True):
        for measure in MEASURES:
            x = np.log10(np.maximum(group[measure].to_numpy(), LEAST))
            line = fit(x, group["final"].to_numpy())
            if line is not None:
                row: dict[str, Any] = dict(zip(keys, key, strict=True))
                ends = {"x_low": 10 ** float(x.min()), "x_high": 10 ** float(x.max())}
                rows.append(row | {"measure": measure} | line._asdict() | ends)
    return pl.DataFrame(rows, schema=_FIT_SCHEMA)


def graph_ranks(runs: pl.DataFrame, of_phases: pl.DataFrame) -> pl.DataFrame:
    """Return the rank of each method by the dispersion of each tensor, at each scale; 1 is least.

    Methods are ranked by the mean over seeds, for each measure and phase.
    """
    mixing = runs.filter(~pl.col("centralized"), pl.col("status") == "done")
    chosen = mixing.select("run_id", "workload", "workers", "method")
    keys = ["workload", "workers", "phase", "tensor"]
    return (
        of_phases.join(chosen, on="run_id", maintain_order="left")
        .unpivot(list(MEASURES), index=[*keys, "method"], variable_name="measure")
        .group_by([*keys, "measure", "method"], maintain_order=True)
        .agg(pl.col("value").mean())
        .with_columns(rank=pl.col("value").rank("average").over([*keys, "measure"]))
    )


def _by_phase(dispersion: pl.DataFrame) -> pl.DataFrame:
    """Return one row per run: the logarithm of each measure in each phase."""
    table = dispersion.select("run_id").unique(maintain_order=True)
    for phase in PHASES:
        own = dispersion.filter(pl.col("phase") == phase).select(
            "run_id",
            *[pl.col(m).clip(lower_bound=LEAST).log(2).alias(f"{phase} {m}") for m in MEASURES],
        )
        table = table.join(own, on="run_id", how="left", maintain_order="left")
    return table


def _scale(means: pl.DataFrame) -> list[dict[str, Any]]:
    """Correlate quality with the number of workers: scales are permuted, alike for all graphs."""
    rows: list[dict[str, Any]] = []
    columns = {"doublings": {"observation": "scale"}}
    for (workload,), group in means.group_by(["workload"], maintain_order=True):
        for (graph,), own in group.group_by(["graph"], maintain_order=True):
            named = {"workload": workload, "method": graph}
            rows += _tested(own, ["workers"], ["variant"], columns, named, "scales")
        mixing = group.filter(~pl.col("centralized"))
        strata, named = ["graph", "variant"], {"workload": workload}
        rows += _tested(mixing, ["workers"], strata, columns, named, "scales")
    return rows


def _by_scale(means: pl.DataFrame, columns: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Correlate quality with columns at each scale, and over all scales as strata."""
    rows: list[dict[str, Any]] = []
    for (workload,), group in means.group_by(["workload"], maintain_order=True):
        for (workers,), own in group.group_by(["workers"], maintain_order=True):
            named = {"workload": workload, "workers": workers}
            rows += _tested(own, ["graph"], ["variant"], columns, named, "graphs")
        strata, named = ["workers", "variant"], {"workload": workload}
        rows += _tested(group, ["graph"], strata, columns, named, "graphs")
    return rows


def _tested(
    means: pl.DataFrame,
    units: list[str],
    strata: list[str],
    columns: dict[str, dict[str, Any]],
    named: dict[str, Any],
    noun: str,
) -> list[dict[str, Any]]:
    found = associations(
        list(means.select(units).iter_rows()),
        list(means.select(strata).iter_rows()),
        means["quality"].to_numpy(),
        means.select(list(columns)).to_numpy(),
        noun,
    )
    runs = {"runs": means["runs"].sum()}
    return [
        named | own | runs | association._asdict()
        for own, association in zip(columns.values(), found, strict=True)
    ]


_OBSERVATION_SCHEMA: dict[str, Any] = {
    "observation": pl.String,
    "workload": pl.String,
    "workers": pl.Int64,
    "method": pl.String,
    "phase": pl.String,
    "measure": pl.String,
    "rho": pl.Float64,
    "p": pl.Float64,
    "p_alone": pl.Float64,
    "least_p": pl.Float64,
    "slope": pl.Float64,
    "slope_low": pl.Float64,
    "slope_high": pl.Float64,
    "detectable": pl.Float64,
    "units": pl.Int64,
    "runs": pl.Int64,
    "note": pl.String,
}

_FIT_SCHEMA: dict[str, Any] = {
    "workload": pl.String,
    "workers": pl.Int64,
    "phase": pl.String,
    "measure": pl.String,
    "slope": pl.Float64,
    "intercept": pl.Float64,
    "r2": pl.Float64,
    "runs": pl.Int64,
    "x_low": pl.Float64,
    "x_high": pl.Float64,
}
