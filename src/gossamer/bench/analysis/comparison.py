"""Compare methods at one scale: results with intervals, costs, verdicts and crossovers.

Runs with the same seed start from the same model and draw the same batches, so methods are compared
by paired differences, seed by seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from gossamer.bench.analysis.statistics import Interval, crossings, interval, noise
from gossamer.bench.analysis.tabulate import Tables

SETTING = ["workload", "workers"]
_COST_AXES: dict[str, pl.Expr] = {
    "bytes_sent": pl.lit(True),
    "modelled_s": pl.col("modelled_s").is_not_null(),
    "train_s": pl.col("engine") == "distributed",
}
"""Costs, and which runs have them: the seconds of a simulation are those of the simulator."""


def summary(runs: pl.DataFrame) -> pl.DataFrame:
    """Return one row per workload, scale and method: its results over seeds, and its cost.

    Results are those of runs that are done; ``planned`` counts runs with any status.
    """
    rows: list[dict[str, Any]] = []
    for key, group in runs.group_by([*SETTING, "method"], maintain_order=True):
        done = group.filter(pl.col("final").is_not_null())
        row: dict[str, Any] = dict(zip([*SETTING, "method"], key, strict=True))
        row |= {
            "metric": group["metric"][0],
            "centralized": group["centralized"][0],
            "runs": len(done),
            "planned": len(group),
            "diverged": group["status"].eq("diverged").sum(),
        }
        for name in ("final", "best", "replicas_mean", "replicas_worst"):
            row |= _spread(done[name].drop_nulls(), name)
        for name in ("connections", "bytes_sent", "train_s"):
            row[name] = done[name].mean()
        rows.append(row)
    return pl.DataFrame(rows, schema=_SUMMARY_SCHEMA).sort(SETTING, maintain_order=True)


def differences(runs: pl.DataFrame, repeated: pl.DataFrame) -> pl.DataFrame:
    """Return one row per pair of methods at one scale: how much better the first one is.

    ``better`` is the mean over shared seeds of the difference in final quality (negated where a
    lower metric is better). Its interval uses the noise of all methods at this scale over the seeds
    that all have, or that of the pair alone if these are fewer than two.

    Args:
        runs: of ``Tables``.
        repeated: as ``graphs.repeats`` returns it; these are left out of the noise.
    """
    rows: list[dict[str, Any]] = []
    done = runs.filter(pl.col("quality").is_not_null())
    for key, group in done.group_by(SETTING, maintain_order=True):
        methods = group["method"].unique(maintain_order=True).to_list()
        of = {m: _by_seed(group.filter(pl.col("method") == m)) for m in methods}
        common = sorted(set[int].intersection(*map(set, of.values())))
        here = repeated.filter(pl.col("workload") == key[0], pl.col("workers") == key[1])
        apart = [m for m in methods if m not in set(here["method"])]
        known = noise([[of[m][seed] for seed in common] for m in apart]) if common else None
        for first in methods:
            for second in methods:
                shared = sorted(of[first].keys() & of[second].keys())
                if first == second or not shared:
                    continue
                gap = interval([of[first][seed] - of[second][seed] for seed in shared], known)
                row: dict[str, Any] = dict(zip(SETTING, key, strict=True))
                row |= {"method": first, "other": second, "seeds": gap.runs}
                rows.append(row | _named(gap, "better"))
    return pl.DataFrame(rows, schema=_DIFFERENCE_SCHEMA)


def verdicts(runs: pl.DataFrame, results: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """Return one row per workload and scale: which method wins, and what it costs.

    The winner has the best mean of the final metric, of the model with average parameters, over
    the seeds that all methods share, among methods of which no run diverged. A method is *level*
    with it unless the interval of their difference is above 0. If no two methods share two seeds
    there is no interval, and ``level`` is null.

    Args:
        runs: of ``Tables``. Runs on processes that repeat simulated ones are left out.
        results: as ``summary`` returns them.
        gaps: as ``differences`` returns them.
    """
    rows: list[dict[str, Any]] = []
    apart = runs.filter(pl.col("quality").is_not_null(), ~pl.col("twin"))
    for key, group in results.group_by(SETTING, maintain_order=True):
        here = pl.col("workload") == key[0], pl.col("workers") == key[1]
        ranked = _ranked(group, apart.filter(*here))
        if not ranked.is_empty():
            rows.append(_verdict(ranked, gaps.filter(*here)))
    return pl.DataFrame(rows, schema=_VERDICT_SCHEMA)


def crossovers(tables: Tables) -> pl.DataFrame:
    """Return where the lead between two methods of one scale changes as they spend more.

    Curves are means over seeds of the averaged model's metric, linear between evaluations, against
    bytes per worker, modelled seconds, and measured ones on processes. If evaluations during
    training use a part of the test samples, the last one is left out: it uses all of them, and is
    not a point of the same curve.
    ``before`` leads up to ``at``, the last crossing, and ``after`` from there on; ``count`` is the
    number of crossings.
    """
    rows: list[dict[str, Any]] = []
    done = tables.runs.filter(pl.col("status") == "done")
    first = pl.col("samples").first().over("run_id")
    alike = tables.evaluations.filter(pl.col("samples").eq_missing(first))
    for axis, known in _COST_AXES.items():
        curves = mean_curves(alike, done.filter(known))
        for key, group in curves.group_by(SETTING, maintain_order=True):
            methods = group["method"].unique(maintain_order=True).to_list()
            sign = 1 if group["higher_is_better"][0] else -1
            of = {m: group.filter(pl.col("method") == m) for m in methods}
            for first, second in itertools.combinations(methods, 2):
                found = _last_crossing(of[first], of[second], axis, sign)
                if found:
                    pair = (second, first) if found["first_after"] else (first, second)
                    row: dict[str, Any] = dict(zip(SETTING, key, strict=True))
                    row |= {"axis": axis, "before": pair[0], "after": pair[1]}
                    rows.append(row | {"at": found["at"], "count": found["count"]})
    frame = pl.DataFrame(rows, schema=_CROSSOVER_SCHEMA)
    return frame.sort(SETTING, maintain_order=True)


def mean_curves(evaluations: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return evaluations by workload, scale, method and step: mean, least and most over runs.

    Args:
        evaluations: of ``Tables``.
        runs: the runs to average. A step that some of a method's runs do not have is left out:
            the mean would be over other runs than at the other steps.
    """
    values = ["average", "replicas_mean", "replicas_worst"]
    named = runs.select("run_id", *SETTING, "method", "higher_is_better")
    return (
        evaluations.join(named, on="run_id", maintain_order="left")
        .group_by([*SETTING, "method", "step"], maintain_order=True)
        .agg(
            pl.col("higher_is_better").first(),
            pl.len().alias("runs"),
            *[pl.col(name).mean() for name in values],
            *[pl.col(name).min().alias(f"{name}_low") for name in values],
            *[pl.col(name).max().alias(f"{name}_high") for name in values],
            pl.col("bytes_sent").mean(),
            pl.col("train_s").mean(),
            pl.col("modelled_s").mean(),
        )
        .filter(pl.col("runs") == pl.col("runs").max().over([*SETTING, "method"]))
        .sort([*SETTING, "method", "step"], maintain_order=True)
    )


def _by_seed(group: pl.DataFrame) -> dict[int, float]:
    return dict(group.group_by("seed").agg(pl.col("quality").mean()).iter_rows())


def _ranked(results: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return the methods without divergence, best first; equal ones by bytes sent."""
    stable = results.filter(pl.col("final").is_not_null(), pl.col("diverged") == 0)
    able = runs.join(stable.select("method"), on="method")
    seeds = [set(group["seed"].to_list()) for _, group in able.group_by("method")]
    shared = set.intersection(*seeds) if seeds else set[int]()
    if shared:
        able = able.filter(pl.col("seed").is_in(list(shared)))
    scores = able.group_by("method").agg(score=pl.col("quality").mean())
    joined = stable.join(scores, on="method", maintain_order="left")
    return joined.sort(["score", "bytes_sent"], descending=[True, False], maintain_order=True)


def _verdict(ranked: pl.DataFrame, gaps: pl.DataFrame) -> dict[str, Any]:
    winner = ranked.row(0, named=True)
    others = ranked["method"].to_list()[1:]
    ahead = gaps.filter(pl.col("method") == winner["method"], pl.col("other").is_in(others))
    behind = ahead.filter(pl.col("better_low") > 0)["other"].to_list()
    level = [name for name in others if name not in behind]
    tested = ahead["better_low"].is_not_null().any() or not others
    able = ranked.filter(pl.col("method").is_in([winner["method"], *level]))
    cheapest = able.sort("bytes_sent", maintain_order=True).row(0, named=True)
    central = ranked.filter(pl.col("centralized"))
    decentralized = ranked.filter(~pl.col("centralized"))
    versus: dict[str, Any] = {}
    if not central.is_empty() and not decentralized.is_empty():
        pair = gaps.filter(
            pl.col("method") == decentralized["method"][0], pl.col("other") == central["method"][0]
        )
        versus = {
            "decentralized": decentralized["method"][0],
            "centralized": central["method"][0],
            **(pair.row(0, named=True) if len(pair) else {}),
        }
    names = ["workload", "workers", "metric", "final", "final_low", "final_high", "runs"]
    return {
        **{name: winner[name] for name in names},
        "winner": winner["method"],
        "winner_bytes": winner["bytes_sent"],
        "methods": len(ranked),
        "level": level if tested else None,
        "cheapest": cheapest["method"] if tested else None,
        "cheapest_final": cheapest["final"] if tested else None,
        "cheapest_bytes": cheapest["bytes_sent"] if tested else None,
        "decentralized": versus.get("decentralized"),
        "centralized": versus.get("centralized"),
        **{name: versus.get(name) for name in ("better", "better_low", "better_high")},
    }


def _last_crossing(
    first: pl.DataFrame, second: pl.DataFrame, axis: str, sign: int
) -> dict[str, Any] | None:
    (x1, y1), (x2, y2) = ((f[axis], sign * f["average"]) for f in (first, second))
    found = crossings((x1.to_numpy(), y1.to_numpy()), (x2.to_numpy(), y2.to_numpy()))
    if not found:
        return None
    end = min(float(x1[-1]), float(x2[-1]))
    last = found[-1]
    beyond = [float(x) for x in [*x1, *x2] if last < x <= end] or [end]
    gap = _at(x1, y1, max(beyond)) - _at(x2, y2, max(beyond))
    return {"at": last, "count": len(found), "first_after": gap > 0}


def _at(x: pl.Series, y: pl.Series, where: float) -> float:
    return float(np.interp(where, x.to_numpy(), y.to_numpy()))


def _spread(values: pl.Series, name: str) -> dict[str, Any]:
    if values.is_empty():
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return _named(interval(values.to_numpy()), name)


def _named(found: Interval, name: str) -> dict[str, Any]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def _bounded(*names: str) -> Iterator[tuple[str, Any]]:
    for name in names:
        for suffix in ("", "_low", "_high"):
            yield f"{name}{suffix}", pl.Float64


_SUMMARY_SCHEMA: dict[str, Any] = {
    "workload": pl.String,
    "workers": pl.Int64,
    "method": pl.String,
    "metric": pl.String,
    "centralized": pl.Boolean,
    "runs": pl.Int64,
    "planned": pl.Int64,
    "diverged": pl.Int64,
    **dict(_bounded("final", "best", "replicas_mean", "replicas_worst")),
    "connections": pl.Float64,
    "bytes_sent": pl.Float64,
    "train_s": pl.Float64,
}

_DIFFERENCE_SCHEMA: dict[str, Any] = {
    "workload": pl.String,
    "workers": pl.Int64,
    "method": pl.String,
    "other": pl.String,
    **dict(_bounded("better")),
    "seeds": pl.Int64,
}

_VERDICT_SCHEMA: dict[str, Any] = {
    "workload": pl.String,
    "workers": pl.Int64,
    "metric": pl.String,
    "winner": pl.String,
    **dict(_bounded("final")),
    "runs": pl.Int64,
    "winner_bytes": pl.Float64,
    "methods": pl.Int64,
    "level": pl.List(pl.String),
    "cheapest": pl.String,
    "cheapest_final": pl.Float64,
    "cheapest_bytes": pl.Float64,
    "decentralized": pl.String,
    "centralized": pl.String,
    **dict(_bounded("better")),
}

_CROSSOVER_SCHEMA: dict[str, Any] = {
    "workload": pl.String,
    "workers": pl.Int64,
    "axis": pl.String,
    "before": pl.String,
    "after": pl.String,
    "at": pl.Float64,
    "count": pl.Int64,
}
