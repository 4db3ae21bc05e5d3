"""Figures over training steps: loss, consensus distance, and decisions of controllers."""

from __future__ import annotations

import math

import polars as pl

from gossamer.bench.analysis import Analysis
from gossamer.bench.analysis.comparison import SETTING
from gossamer.bench.report.figure import Figure, series
from gossamer.bench.report.style import Style
from gossamer.bench.report.traces import Trace, band, line, mark, points, thin

_LOSSES = {"loss": "mean over workers", "worst_loss": "worst worker"}
_SPREAD = [*_LOSSES, "distance"]
"""Columns drawn with a band from the lowest seed to the highest."""

_DECISIONS = {
    "degree": "neighbours k",
    "rounds": "gossip rounds per step",
    "target": "target distance",
}


def loss_figure(analysis: Analysis, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    """Return the training loss, a curve per method."""
    traces: list[Trace] = []
    for (workload, workers, method), curve in series(_mean_steps(analysis, shown)):
        for column in _LOSSES:
            kept = thin(curve.filter(pl.col(column).is_finite()))
            meta = mark(workload, workers, method, "steps", "training loss", show=column)
            if (kept["runs"] > 1).any():
                bounds = (kept[f"{column}_low"], kept[f"{column}_high"])
                traces.append(band(look[method], kept["step"], *bounds, meta))
            if len(kept):
                hover = "step %{x}: loss %{y:.4g}"
                traces.append(line(look[method], kept["step"], kept[column], meta, hover))
    return Figure(
        "loss",
        "Training loss",
        "Each worker's loss on its batch at its own parameters, before the update: the mean over "
        "workers, or the worst. Lines are means over seeds, the band spans from the lowest seed to "
        "the highest. Where the loss is lower but the metric no better, workers overfit their own "
        "samples.",
        traces,
        {},
        choices={"show": _LOSSES},
    )


def distance_figure(analysis: Analysis, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    """Return the consensus distance on a logarithmic axis; zeros are markers at its lower edge."""
    traces: list[Trace] = []
    curves = _mean_steps(analysis, shown.filter(~pl.col("centralized")))
    floors = _floors(curves)
    labelled: set[tuple[str, int]] = set()
    for (workload, workers, method), curve in series(curves):
        meta = mark(workload, workers, method, "steps", "consensus distance Ξ")
        floor = floors[workload]
        apart = thin(curve.filter(pl.col("distance") > 0))
        if (apart["runs"] > 1).any():
            low = apart["distance_low"].clip(lower_bound=floor)
            traces.append(band(look[method], apart["step"], low, apart["distance_high"], meta))
        if len(apart):
            hover = "step %{x}: Ξ %{y:.3g}"
            traces.append(line(look[method], apart["step"], apart["distance"], meta, hover))
        equal = thin(curve.filter(pl.col("distance") == 0))
        if len(equal):
            trace = _zeros(look[method], equal["step"], floor, meta)
            if (workload, workers) not in labelled:
                trace |= {"mode": "markers+text", "text": ["Ξ = 0"], "textposition": "top right"}
            labelled.add((workload, workers))
            traces.append(trace | {"showlegend": not len(apart)})
    return Figure(
        "distance",
        "Consensus distance",
        "Root mean square distance of workers' parameters from their mean. It follows the "
        "learning rate; a graph that mixes better keeps it lower. Band: lowest to highest seed. "
        "An open triangle at the lower edge is Ξ = 0, which a logarithmic axis cannot show: all "
        "workers are equal, as after an exact average.",
        traces,
        {"yaxis": {"type": "log", "exponentformat": "power"}},
    )


def _floors(curves: pl.DataFrame) -> dict[str, float]:
    """Return, for each workload, a power of ten below all positive values."""
    floors: dict[str, float] = {}
    for (workload,), group in curves.group_by(["workload"], maintain_order=True):
        values = group.select(pl.concat_list("distance", "distance_low").explode()).to_series()
        least = values.filter(values > 0).min()
        floors[str(workload)] = 10.0 ** (math.ceil(math.log10(float(str(least or 1)))) - 1)
    return floors


def _zeros(style: Style, steps: pl.Series, floor: float, meta: dict[str, object]) -> Trace:
    trace = points(style, steps, [floor] * len(steps), meta, "step %{x}: Ξ = 0")
    trace["marker"] |= {"symbol": "triangle-down-open", "line": {"width": 1.5}}
    return trace


def decisions_figure(analysis: Analysis, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    """Return neighbours, rounds and targets of methods whose communication changes."""
    traces: list[Trace] = []
    deciding = _mean_steps(analysis, shown.filter(~pl.col("centralized")))
    for (workload, workers, method), curve in series(deciding):
        controlled = curve["target"].is_not_null().any()
        if curve["degree"].n_unique() == 1 and curve["rounds"].n_unique() == 1 and not controlled:
            continue
        for what, y_name in _DECISIONS.items():
            kept = thin(curve.filter(pl.col(what).is_finite()))
            if kept.is_empty():
                continue
            meta = mark(workload, workers, method, "steps", y_name, show=what)
            trace = line(
                look[method], kept["step"], kept[what], meta, f"step %{{x}}: %{{y:.3~g}} {y_name}"
            )
            trace["line"]["shape"] = "hv"
            traces.append(trace)
    return Figure(
        "decisions",
        "Graphs that change, and controllers",
        "Only methods whose communication changes during training: the neighbours of Ada's "
        "lattice, which thins out, and how often a controller mixes to keep the distance under its "
        "target. Mean over seeds.",
        traces,
        {},
        choices={"show": _DECISIONS},
    )


def _mean_steps(analysis: Analysis, runs: pl.DataFrame) -> pl.DataFrame:
    named = runs.select("run_id", *SETTING, "method")
    target = pl.col("target").filter(pl.col("target").is_finite()).mean()
    return (
        analysis.steps.join(named, on="run_id", maintain_order="left")
        .group_by([*SETTING, "method", "step"], maintain_order=True)
        .agg(
            pl.len().alias("runs"),
            pl.col("degree", "rounds").cast(pl.Float64).mean(),
            target,
            *[pl.col(name).mean() for name in _SPREAD],
            *[pl.col(name).min().alias(f"{name}_low") for name in _SPREAD],
            *[pl.col(name).max().alias(f"{name}_high") for name in _SPREAD],
        )
        .sort([*SETTING, "method", "step"], maintain_order=True)
    )
