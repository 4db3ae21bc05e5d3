"""Add modelled seconds to the rows of a run."""

from __future__ import annotations

import polars as pl

from gossamer.bench.analysis.tabulate import RunRows
from gossamer.bench.clock import Clock, Mark


def timed(rows: RunRows, clock: Clock | None) -> RunRows:
    """Return rows with ``modelled_s``, if the clock can predict it."""
    if clock is None:
        return rows
    steps = rows.steps.select("step", "bytes_sent", "degree")
    evaluations = rows.evaluations.select("step", "bytes_sent", degree=pl.lit(None, pl.Int64))
    known = pl.concat([steps, evaluations]).unique("step", keep="first").sort("step")
    # A step record has the decision of the interval that it ends.
    degree = pl.col("degree").fill_null(strategy="backward").fill_null(strategy="forward")
    marks = known.with_columns(degree.fill_null(0)).iter_rows()
    found = clock.seconds(
        rows.run["spec"], rows.run["parameter_bytes"] or 0, [*map(Mark._make, marks)]
    )
    if found is None or not found:
        return rows
    seconds = known.select("step", modelled_s=pl.Series(found, dtype=pl.Float64))
    return rows._replace(
        run=rows.run | {"modelled_s": found[-1]},
        steps=_with_seconds(rows.steps, seconds),
        evaluations=_with_seconds(rows.evaluations, seconds),
    )


def _with_seconds(table: pl.DataFrame, seconds: pl.DataFrame) -> pl.DataFrame:
    joined = table.drop("modelled_s").join(seconds, on="step", how="left", maintain_order="left")
    return joined.select(table.columns)
