"""Modelled time to the target of the same runs on several links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from gossamer.bench.analysis.comparison import SETTING
from gossamer.bench.analysis.tabulate import RunRows, join
from gossamer.bench.analysis.targets import targets as target_costs
from gossamer.bench.analysis.timed import timed
from gossamer.bench.clock import Clock


def on_links(
    rows: Sequence[RunRows],
    clocks: Sequence[Clock],
    names: Mapping[str, str],
    targets: Mapping[str, float] | None = None,
) -> pl.DataFrame:
    """Return one row per workload, scale, link and method: modelled seconds to the target.

    The fastest comes first. For a method that does not reach the target ``more_than_modelled_s`` is
    a lower bound. Methods whose time cannot be modelled are left out.

    Args:
        rows: of each run.
        clocks: one per link.
        names: of methods, by run.
        targets: by workload; they replace the workloads' own.
    """
    found = [NO_LINKS.with_columns(index=pl.lit(0))]
    for index, clock in enumerate(clocks):
        runs = join([timed(of_run, clock) for of_run in rows], names, targets).runs
        costs = target_costs(runs.filter(pl.col("engine") == "simulated"))
        costs = costs.with_columns(link=pl.lit(clock.link), index=pl.lit(index))
        known = costs.filter(pl.any_horizontal(pl.col(*_SECONDS).is_not_null()))
        found.append(known.select(*_SCHEMA, "index"))
    ordered = pl.concat(found).sort([*SETTING, "index", *_SECONDS], nulls_last=True)
    return ordered.select(_SCHEMA.keys())


_SECONDS = ("modelled_s", "more_than_modelled_s")

_SCHEMA: dict[str, Any] = {
    "workload": pl.String,
    "workers": pl.Int64,
    "link": pl.String,
    "method": pl.String,
    "centralized": pl.Boolean,
    "metric": pl.String,
    "target": pl.Float64,
    "runs": pl.Int64,
    **dict.fromkeys(_SECONDS, pl.Float64),
}

NO_LINKS = pl.DataFrame(schema=_SCHEMA)
"""The table of an experiment with at most one link."""
