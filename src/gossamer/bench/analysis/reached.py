"""The cost at which a run reached its target: at its first evaluation that is as good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

REACHED_SCHEMA: dict[str, Any] = {
    "target": pl.Float64,
    "target_step": pl.Int64,
    "target_bytes": pl.Float64,
    "target_s": pl.Float64,
    "target_modelled_s": pl.Float64,
}


def reach(
    run: Mapping[str, Any], evaluations: pl.DataFrame, target: float | None
) -> dict[str, Any]:
    """Return what a run had spent when it reached its target; None if it did not, or is not done.

    Args:
        run: its row.
        evaluations: in order.
        target: of the metric; None if the workload has none.
    """
    found: dict[str, Any] = dict.fromkeys(REACHED_SCHEMA) | {"target": target}
    if target is None or run["status"] != "done":
        return found
    sign = 1 if run["higher_is_better"] else -1
    good = evaluations.filter(sign * pl.col("average") >= sign * target)
    if good.is_empty():
        return found
    first = good.row(0, named=True)
    return found | {
        "target_step": first["step"],
        "target_bytes": first["bytes_sent"],
        "target_s": first["train_s"],
        "target_modelled_s": first["modelled_s"],
    }
