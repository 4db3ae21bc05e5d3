"""Modelled seconds beside measured ones, in the rows of a run."""

from __future__ import annotations

import polars as pl

from gossamer.bench.analysis.tabulate import RunRows
from gossamer.bench.modelled import Clock


def timed(rows: RunRows, clock: Clock | None) -> RunRows:
    """Return rows with ``modelled_s``, where a clock tells it."""
    if clock is None:
        return rows
    known = pl.concat([t.select("step", "bytes_sent") for t in (rows.steps, rows.evaluations)])
    known = known.unique("step").sort("step")
    spent = list(known.iter_rows())
    found = clock.seconds(rows.run["spec"], rows.run["parameter_bytes"] or 0, spent)
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
