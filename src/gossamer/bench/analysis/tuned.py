"""Results of trials: a curve over learning rates for each method, and its best rate."""

from __future__ import annotations

import math
from typing import Any

import polars as pl

from gossamer.bench.tuning import WORST, best_place, edge_of

_METHOD = ["workload", "workers", "method"]


def sensitivity(trials: pl.DataFrame) -> pl.DataFrame:
    """Return one row per method and learning rate: the metric on validation samples, over seeds.

    Args:
        trials: of ``Tables``. Those without a result yet, or that failed, do not count; a rate at
            which one diverged has no metric.
    """
    ended = trials.filter(pl.col("status").is_in(["done", "diverged"]))
    # A metric that is not finite counts as divergence, like a loss that is not.
    metric = pl.col("final").filter(pl.col("final").is_finite())
    diverged = pl.len() - metric.len()
    rates = (
        ended.group_by([*_METHOD, "lr"], maintain_order=True)
        .agg(
            pl.col("metric").first(),
            pl.col("higher_is_better").first(),
            pl.len().cast(pl.Int64).alias("trials"),
            diverged.cast(pl.Int64).alias("diverged"),
            pl.when(diverged == 0).then(metric.mean()).alias("validation"),
            pl.when(diverged == 0).then(metric.min()).alias("validation_low"),
            pl.when(diverged == 0).then(metric.max()).alias("validation_high"),
        )
        .sort([*_METHOD[:2]], maintain_order=True)
    )
    groups = rates.group_by(_METHOD, maintain_order=True)
    return pl.concat([rates.clear(), *(group.sort("lr") for _, group in groups)])


def tuning(curves: pl.DataFrame, results: pl.DataFrame) -> pl.DataFrame:
    """Return one row per tuned method: its best rate, and the result of that rate on the test.

    Args:
        curves: as ``sensitivity`` returns them.
        results: as ``summary`` returns them.
    """
    rows: list[dict[str, Any]] = []
    for key, group in curves.group_by(_METHOD, maintain_order=True):
        row: dict[str, Any] = dict(zip(_METHOD, key, strict=True))
        sign = 1 if group["higher_is_better"][0] else -1
        qualities = [WORST if v is None else sign * v for v in group["validation"]]
        place = best_place(qualities)
        rows.append(
            row
            | {
                "metric": group["metric"][0],
                "rates": len(group),
                "trials": group["trials"].sum(),
                "lowest": group["lr"].min(),
                "highest": group["lr"].max(),
                "diverged": sum(map(math.isinf, qualities)),
                "best": group["lr"][place],
                "edge": edge_of(place, len(group)),
                "validation": group["validation"][place],
            }
        )
    finals = results.select(*_METHOD, "final", "final_low", "final_high", "runs")
    return pl.DataFrame(rows, schema=_SCHEMA).join(
        finals, on=_METHOD, how="left", maintain_order="left"
    )


_SCHEMA: dict[str, Any] = {
    "workload": pl.String,
    "workers": pl.Int64,
    "method": pl.String,
    "metric": pl.String,
    "rates": pl.Int64,
    "trials": pl.Int64,
    "lowest": pl.Float64,
    "highest": pl.Float64,
    "diverged": pl.Int64,
    "best": pl.Float64,
    "edge": pl.String,
    "validation": pl.Float64,
}
