"""The cost to reach a target in steps, bytes and seconds, and performance profiles over settings.

A run that ended without reaching its target is censored: its cost is more than what it spent. One
that diverged never reaches it. Both are ranked last in medians over seeds.

Reference: Dolan and Moré, Benchmarking optimization software with performance profiles
(https://arxiv.org/abs/cs/0102001); Dahl et al., AlgoPerf (https://arxiv.org/abs/2306.07179).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from gossamer.bench.analysis.comparison import SETTING

FARTHEST = 4.0
"""The ratio up to which a profile is scored, as in AlgoPerf."""


class Cost(NamedTuple):
    """A kind of cost."""

    reached: str
    """The column of runs with the cost at the target."""

    spent: str
    """The column of runs with the total cost."""

    label: str


COSTS: dict[str, Cost] = {
    "step": Cost("target_step", "steps", "steps"),
    "bytes_sent": Cost("target_bytes", "bytes_sent", "bytes sent per worker"),
    "modelled_s": Cost("target_modelled_s", "modelled_s", "modelled seconds"),
    "train_s": Cost("target_s", "train_s", "measured seconds, on processes"),
}


def targets(runs: pl.DataFrame) -> pl.DataFrame:
    """Return one row per workload, scale and method: the cost of the median seed to the target.

    If half of the seeds or more do not reach it there is no median, and ``more_than_…`` is a lower
    bound: the least that a run spent which ended without reaching it. Measured seconds are those of
    runs on processes only.

    Args:
        runs: of ``Tables``; those that are done or diverged count.
    """
    rows: list[dict[str, Any]] = []
    ended = runs.filter(
        pl.col("target").is_not_null(), pl.col("status").is_in(["done", "diverged"])
    )
    for key, group in ended.group_by([*SETTING, "method"], maintain_order=True):
        row: dict[str, Any] = dict(zip([*SETTING, "method"], key, strict=True))
        row |= {name: group[name][0] for name in ("centralized", "metric", "target", "engine")}
        row |= {
            "runs": len(group),
            "reached": group["target_step"].is_not_null().sum(),
            "diverged": group["status"].eq("diverged").sum(),
        }
        for name, cost in COSTS.items():
            if name == "train_s" and group["engine"][0] != "distributed":
                continue
            without = group.filter(pl.col("target_step").is_null(), pl.col("status") == "done")
            row[name] = censored_median(group[cost.reached].to_list())
            if row[name] is None:
                row[f"more_than_{name}"] = without[cost.spent].min()
        rows.append(row)
    return pl.DataFrame(rows, schema=_TARGET_SCHEMA).sort(SETTING, maintain_order=True)


def censored_median(values: Sequence[float | None]) -> float | None:
    """Return the median, where None counts as infinite; None if the median is infinite.

    >>> censored_median([3, None, 1]), censored_median([3, None])
    (3.0, None)
    """
    found = float(np.median([math.inf if value is None else value for value in values]))
    return found if math.isfinite(found) else None


def profiles(found: pl.DataFrame) -> pl.DataFrame:
    """Return, for each cost and method, the share of settings solved within a ratio of the best.

    A setting is a workload at a scale; it counts if all methods were run at it and the median seed
    of at least one solves it. One row for each step of the curve, the first at a ratio of 1.

    Args:
        found: as ``targets`` returns it. If there are simulated runs, only these count.
    """
    rows: list[dict[str, Any]] = []
    for cost in COSTS:
        for method, ratios in _ratios(found, cost).items():
            solved = sorted(ratio for ratio in ratios if math.isfinite(ratio))
            for ratio in sorted({1.0, *solved}):
                share = sum(each <= ratio for each in solved) / len(ratios)
                rows.append({"cost": cost, "method": method, "ratio": ratio, "share": share})
    return pl.DataFrame(rows, schema=_PROFILE_SCHEMA)


def scores(found: pl.DataFrame) -> pl.DataFrame:
    """Return one row for each cost and method: its profile in three numbers.

    ``best`` is the share of settings at which it is first, ``solved`` the share that it solves,
    ``score`` the mean height of its profile for ratios up to 4.

    Args:
        found: as ``targets`` returns it.
    """
    rows: list[dict[str, Any]] = []
    for cost in COSTS:
        for method, ratios in _ratios(found, cost).items():
            # A step of the profile at r adds to its height from r on.
            heights = [max(0.0, FARTHEST - ratio) / (FARTHEST - 1) for ratio in ratios]
            row = {
                "cost": cost,
                "method": method,
                "settings": len(ratios),
                "best": float(np.mean([ratio == 1 for ratio in ratios])),
                "solved": float(np.mean(np.isfinite(ratios))),
                "score": float(np.mean(heights)),
            }
            rows.append(row)
    return pl.DataFrame(rows, schema=_SCORE_SCHEMA)


def _ratios(found: pl.DataFrame, cost: str) -> dict[str, list[float]]:
    """Return each method's cost relative to the least, at every setting; ∞ where it fails."""
    simulated = found.filter(pl.col("engine") == "simulated")
    chosen = simulated if len(simulated) else found
    methods = chosen["method"].unique(maintain_order=True).to_list()
    ratios: dict[str, list[float]] = {method: [] for method in methods}
    for _, group in chosen.group_by(SETTING, maintain_order=True):
        spent = dict(group.select("method", cost).iter_rows())
        solved = [value for value in spent.values() if value is not None]
        if len(spent) < len(methods) or not solved:
            continue
        for method, value in spent.items():
            ratios[method].append(_ratio(value, min(solved)))
    return {method: own for method, own in ratios.items() if own}


def _ratio(value: float | None, best: float) -> float:
    if value is None:
        return math.inf
    if value == best:
        return 1.0
    return value / best if best else math.inf


_TARGET_SCHEMA: dict[str, Any] = {
    "workload": pl.String,
    "workers": pl.Int64,
    "method": pl.String,
    "centralized": pl.Boolean,
    "metric": pl.String,
    "target": pl.Float64,
    "engine": pl.String,
    "runs": pl.Int64,
    "reached": pl.Int64,
    "diverged": pl.Int64,
    **dict.fromkeys(COSTS, pl.Float64),
    **{f"more_than_{name}": pl.Float64 for name in COSTS},
}

_PROFILE_SCHEMA: dict[str, Any] = {
    "cost": pl.String,
    "method": pl.String,
    "ratio": pl.Float64,
    "share": pl.Float64,
}

_SCORE_SCHEMA: dict[str, Any] = {
    "cost": pl.String,
    "method": pl.String,
    "settings": pl.Int64,
    "best": pl.Float64,
    "solved": pl.Float64,
    "score": pl.Float64,
}
