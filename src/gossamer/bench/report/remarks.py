"""What a reader must know before believing a page: who was counted once, what varies together."""

from __future__ import annotations

import polars as pl

from gossamer.bench.analysis import Analysis
from gossamer.bench.report.words import listed, quoted


def remarks(analysis: Analysis) -> dict[str, list[str]]:
    """Return sentences for each workload that has runs with a result."""
    found: dict[str, list[str]] = {}
    for (workload,), runs in analysis.runs.group_by(["workload"], maintain_order=True):
        repeated = analysis.repeats.filter(pl.col("workload") == workload)
        found[str(workload)] = [*_facet(runs["facet"][0]), *_repeats(repeated), *_alone(runs)]
    return found


def _facet(facet: str) -> list[str]:
    """Say that there are other settings."""
    if not facet:
        return []
    return [
        f"All this is of one setting, {facet}: methods are compared within it, and never with runs "
        "of another. The others are listed as workloads in the filter."
    ]


def _repeats(repeated: pl.DataFrame) -> list[str]:
    """Name methods that are the same trajectory."""
    pairs = repeated.group_by(["method", "same_as"], maintain_order=True).agg("workers")
    return [
        f"{quoted(method)} and {quoted(same)} are the same trajectory, bit by bit, on "
        f"{listed([str(scale) for scale in sorted(scales)])} workers: they count once."
        for method, same, scales in pairs.iter_rows()
    ]


def _alone(runs: pl.DataFrame) -> list[str]:
    """Name methods that differ from all others in more than their graph."""
    mixing = runs.filter(pl.col("quality").is_not_null(), ~pl.col("twin"), ~pl.col("centralized"))
    graphs = pl.col("graph").n_unique()
    mixing = mixing.filter(graphs.over("workers") > 1)
    compared = set(mixing.filter(graphs.over(["workers", "variant"]) > 1)["method"])
    alone = [name for name in mixing["method"].unique(maintain_order=True) if name not in compared]
    if not alone or not compared:
        return []
    are, their = ("is", "its") if len(alone) == 1 else ("are", "their")
    return [
        f"{listed([quoted(name) for name in alone])} {are} not counted where results are set "
        f"against connections and dispersion: no other graph has {their} optimizer and recipe."
    ]
