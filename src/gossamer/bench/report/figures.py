"""Turn tables into figures: plain plotly traces, each with the metadata that the page filters by.

The metadata (``meta``) are workload, scale, method, and the option of figures that have a menu. The
same traces are written as images. Long series are subsampled here and nowhere else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import polars as pl

from gossamer.bench.analysis import MEASURES, PHASES, Analysis
from gossamer.bench.analysis.comparison import SETTING, mean_curves
from gossamer.bench.analysis.observations import LEAST
from gossamer.bench.report.figure import Figure, series
from gossamer.bench.report.step_figures import decisions_figure, distance_figure, loss_figure
from gossamer.bench.report.style import Style, styles
from gossamer.bench.report.target_figures import profile_figure, target_figure
from gossamer.bench.report.traces import Trace, band, line, mark, numbers, points, thin
from gossamer.bench.report.tuning_figures import sensitivity_figure
from gossamer.charts.theme import REFERENCE

_TENSORS = 6
"""The most tensors that can be selected one by one."""

_MANY_SERIES = 60
"""With more series, tensors cannot be selected one by one: the page would get too large."""

_ASIDE = 0.3
"""The width over which the methods of one scale are spread, in powers of two; less where scales
are closer together."""

_ROLES: dict[str, str] = {
    "average": "average model",
    "replicas_mean": "replicas, mean",
    "replicas_worst": "replicas, worst",
}


def method_styles(runs: pl.DataFrame) -> dict[str, Style]:
    """Return the style of every method, in the order of the experiment."""
    named = runs.select("method", "centralized").unique(maintain_order=True)
    central = named.filter(pl.col("centralized"))["method"].to_list()
    return styles([name for name in named["method"] if name not in central], central)


def figures(analysis: Analysis, norms: pl.DataFrame | None = None) -> list[Figure]:
    """Return all figures that have data.

    Args:
        analysis: the tables.
        norms: quantiles of norms over workers, by run, step and tensor, if stored.
    """
    look = method_styles(analysis.all_runs)
    shown = _shown(analysis.runs)
    on_processes = shown.filter(pl.col("engine") == "distributed")
    drawn = [
        _scale(analysis, look),
        _curves(analysis, shown, look, _STEPS),
        loss_figure(analysis, shown, look),
        _connections(analysis, look),
        _accuracy_by_dispersion(analysis, look),
        _dispersion_by_step(analysis, shown, look),
        *([] if norms is None else [_norms(norms, shown, look)]),
        distance_figure(analysis, shown, look),
        decisions_figure(analysis, shown, look),
        _curves(analysis, shown, look, _BYTES),
        _curves(analysis, shown, look, _MODELLED),
        _curves(analysis, on_processes, look, _SECONDS),
        target_figure(analysis, look),
        profile_figure(analysis, look),
        sensitivity_figure(analysis, look),
    ]
    return [figure for figure in drawn if figure.traces]


def _shown(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the runs whose curves are drawn: those that are done, or all if none is."""
    done = (pl.col("status") == "done").any().over([*SETTING, "method"])
    return runs.filter((pl.col("status") == "done") | ~done)


# - Figures, in the order of the page


def _scale(analysis: Analysis, look: dict[str, Style]) -> Figure:
    traces: list[Trace] = []
    known = analysis.summary.filter(pl.col("final").is_not_null())
    scales = sorted(set(known["workers"].to_list()))
    closest = min((math.log2(b / a) for a, b in itertools.pairwise(scales)), default=1.0)
    breadth = min(_ASIDE, 0.6 * closest)
    for (workload, method), group in known.group_by(["workload", "method"], maintain_order=True):
        ordered = group.sort("workers")
        meta = mark(str(workload), None, str(method), "workers", ordered["metric"][0])
        # Shifted a little, or the intervals of methods would overlap.
        aside = 2 ** (breadth * (list(look).index(str(method)) / max(1, len(look) - 1) - 0.5))
        x = ordered["workers"] * aside
        trace = line(
            look[str(method)],
            x,
            ordered["final"],
            meta,
            "%{customdata} workers: %{y:.4g}",
            markers=20,
        )
        trace["customdata"] = ordered["workers"].to_list()
        if ordered["final_low"].is_not_null().any():
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": numbers(ordered["final_high"] - ordered["final"]),
                "arrayminus": numbers(ordered["final"] - ordered["final_low"]),
                "thickness": 1,
                "width": 3,
            }
        meta["scales"] = ordered["workers"].to_list()
        traces.append(trace)
    ticks = {"tickvals": scales, "ticktext": [str(scale) for scale in scales]}
    return Figure(
        "scale",
        "Result against scale",
        "Final metric of the averaged model, mean over seeds with its 95 % interval. Where a line "
        "gets worse to the right, the method loses with scale.",
        traces,
        {"xaxis": {"type": "log", **ticks}},
        faceted=False,
    )


class _Spent(NamedTuple):
    """A quantity that results are drawn against, and the texts of its figure."""

    column: str
    axis: str
    unit: str
    name: str
    title: str
    reading: str
    scale: float = 1
    """Units of the column per unit of the axis."""

    axes: dict[str, Any] = {}  # noqa: RUF012 - never changed


_STEPS = _Spent(
    column="step",
    axis="steps",
    unit="steps",
    name="learning",
    title="Learning curves",
    reading="Lines are means over seeds; the band spans from the lowest seed to the highest. "
    "Where replicas are far below the average model, workers disagree.",
)
_BYTES = _Spent(
    column="bytes_sent",
    axis="MB sent per worker",
    unit="MB sent",
    name="bytes",
    title="Result per byte sent",
    reading="The same curves against what the average worker has sent. Further up and to the "
    "left is better: more learned for less traffic. The axis is logarithmic.",
    scale=1e6,
    axes={"xaxis": {"type": "log"}},
)
_SECONDS = _Spent(
    column="train_s",
    axis="seconds of training",
    unit="seconds of training",
    name="seconds",
    title="Result per second, on processes",
    reading="The same curves against measured time in training steps. Only runs on real "
    "processes: the seconds of a simulation are those of the simulator.",
)


_MODELLED = _Spent(
    column="modelled_s",
    axis="modelled seconds",
    unit="modelled seconds",
    name="modelled",
    title="Result per modelled second",
    reading="The same curves against the time that the runtime model gives to the steps of each "
    "run, on the experiment's links. Further up and to the left is better.",
)


def _curves(
    analysis: Analysis, runs: pl.DataFrame, look: dict[str, Style], spent: _Spent
) -> Figure:
    traces: list[Trace] = []
    metrics = _metrics(analysis)
    for (workload, workers, method), curve in series(mean_curves(analysis.evaluations, runs)):
        for role in _ROLES:
            known = pl.col(role).is_not_null() & pl.col(spent.column).is_not_null()
            kept = thin(curve.filter(known))
            if kept.is_empty():
                continue
            x = kept[spent.column] / spent.scale
            meta = mark(workload, workers, method, spent.axis, metrics[workload], show=role)
            if (kept["runs"] > 1).any():
                bounds = (kept[f"{role}_low"], kept[f"{role}_high"])
                traces.append(band(look[method], x, *bounds, meta))
            trace = line(look[method], x, kept[role], meta, f"%{{x:.4~g}} {spent.unit}: %{{y:.4g}}")
            traces.append(trace)
    return Figure(
        spent.name, spent.title, spent.reading, traces, spent.axes, choices={"show": _ROLES}
    )


def _connections(analysis: Analysis, look: dict[str, Style]) -> Figure:
    done = analysis.runs.filter(pl.col("final").is_not_null(), ~pl.col("centralized"))
    done = done.filter(pl.col("connections").is_not_null())
    x_name = "neighbours heard per step"
    traces: list[Trace] = []
    for (workload, workers, method), group in series(done):
        meta = mark(workload, workers, method, x_name, group["metric"][0])
        trace = points(
            look[method],
            group["connections"],
            group["final"],
            meta,
            "%{x:.4~g} neighbours per step: %{y:.4g}",
        )
        traces.append(trace)
    traces += _references(analysis, look, done["connections"], x_name)
    return Figure(
        "connections",
        "Result against connections",
        "One point per run. Neighbours heard per step are the mean over training: a graph's degree "
        "times its rounds. The dashed grey line is centralized training. Points that rise to the "
        "right mean that more connections go with a better result.",
        traces,
        {"xaxis": {"type": "log"}},
    )


def _accuracy_by_dispersion(analysis: Analysis, look: dict[str, Style]) -> Figure:
    done = analysis.runs.filter(pl.col("final").is_not_null(), ~pl.col("centralized"))
    joined = analysis.dispersion_by_run.join(done, on="run_id", maintain_order="left")
    traces: list[Trace] = []
    for (workload, workers, method), group in series(joined):
        for (phase,), part in group.group_by(["phase"], maintain_order=True):
            for measure, x_name in MEASURES.items():
                chosen = {"measure": measure, "phase": str(phase)}
                meta = mark(workload, workers, method, x_name, part["metric"][0], **chosen)
                trace = points(
                    look[method],
                    part[measure],
                    part["final"],
                    meta,
                    "dispersion %{x:.3g}: %{y:.4g}",
                )
                traces.append(trace)
    traces += _fit_lines(analysis)
    return Figure(
        "dispersion",
        "Result against dispersion",
        "One point per run: how unequal the norms of parameter tensors were across replicas, just "
        "before averaging, in a third of training (geometric mean over tensors). The line is a "
        "least-squares fit over all methods at that scale. Points that fall to the right mean that "
        "replicas that differ more go with a worse result.",
        traces,
        {"xaxis": {"type": "log", "exponentformat": "power"}},
        choices={
            "measure": MEASURES,
            "phase": {phase: f"{phase} in training" for phase in PHASES},
        },
    )


def _fit_lines(analysis: Analysis) -> Iterator[Trace]:
    metrics = _metrics(analysis)
    for row in analysis.fits.iter_rows(named=True):
        ends = [row["x_low"], row["x_high"]]
        chosen = {"measure": row["measure"], "phase": row["phase"]}
        named = (row["workload"], row["workers"], None)
        meta = mark(*named, MEASURES[row["measure"]], metrics[row["workload"]], **chosen)
        yield {
            "type": "scatter",
            "mode": "lines",
            "x": numbers(ends),
            "y": numbers(row["intercept"] + row["slope"] * math.log10(x) for x in ends),
            "name": "fit",
            "line": {"color": REFERENCE, "width": 1.5},
            "hovertemplate": f"fit: {row['slope']:+.3g} per factor 10, R² {row['r2']:.2f}"
            "<extra></extra>",
            "meta": meta,
        }


def _dispersion_by_step(analysis: Analysis, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    named = shown.select("run_id", *SETTING, "method")
    joined = analysis.dispersion.join(named, on="run_id", maintain_order="left").with_columns(
        pl.col(list(MEASURES)).clip(lower_bound=LEAST).log10()
    )
    num_series = shown.select(*SETTING, "method").n_unique()
    tensors: list[str] = []
    if num_series <= _MANY_SERIES:
        tensors = joined["tensor"].unique(maintain_order=True).to_list()[:_TENSORS]
    options = {"all": "all tensors", **{name: name for name in tensors}}
    traces: list[Trace] = []
    for tensor in options:
        part = joined if tensor == "all" else joined.filter(pl.col("tensor") == tensor)
        by_step = part.group_by([*SETTING, "method", "step"], maintain_order=True).agg(
            pl.col(list(MEASURES)).mean()
        )
        for (workload, workers, method), curve in series(by_step):
            kept = thin(curve.sort("step"))
            for measure, y_name in MEASURES.items():
                chosen = {"measure": measure, "tensor": tensor}
                meta = mark(workload, workers, method, "steps", y_name, **chosen)
                trace = line(
                    look[method], kept["step"], 10 ** kept[measure], meta, "step %{x}: %{y:.3g}"
                )
                traces.append(trace)
    return Figure(
        "dispersion-by-step",
        "Dispersion over training",
        "How unequal the norms of tensors are across replicas, just before averaging; geometric "
        "mean over seeds, and over all tensors or for one. Graphs with more connections should be "
        "lower, most clearly early in training.",
        traces,
        {"yaxis": {"type": "log", "exponentformat": "power", "dtick": 1}},
        choices={"measure": MEASURES, "tensor": options},
    )


_NORMS = {"range": "(largest − smallest) / median", "median": "median norm"}


def _norms(norms: pl.DataFrame, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    by_seed = shown.select("run_id", "seed", *SETTING, "method").sort("seed", maintain_order=True)
    first = by_seed.unique([*SETTING, "method"], keep="first", maintain_order=True)
    joined = first.join(norms, on="run_id", maintain_order="left_right")
    tensors = joined["tensor"].unique(maintain_order=True).to_list()
    tensors = tensors[: _TENSORS if len(first) <= _MANY_SERIES else 1]
    traces: list[Trace] = []
    for tensor in tensors:
        for (workload, workers, method), curve in series(joined.filter(tensor=tensor)):
            kept = curve.sort("step")
            steps, middle = kept["step"], kept["median"]
            curves = {"range": (kept["largest"] - kept["least"]) / middle, "median": middle}
            for show, values in curves.items():
                chosen = {"show": show, "tensor": tensor}
                meta = mark(workload, workers, method, "steps", _NORMS[show], **chosen)
                traces.append(line(look[method], steps, values, meta, "step %{x}: %{y:.4g}"))
    return Figure(
        "norms",
        "Norms of replicas",
        "The L2 norm of one tensor, just before averaging, in the run of the first seed: the "
        "difference between the largest and the smallest over workers, relative to the median, or "
        "the median itself. All norms are in norms/<run>.parquet in the folder.",
        traces,
        {},
        choices={"show": _NORMS, "tensor": {tensor: tensor for tensor in tensors}},
    )


# - Parts


def _metrics(analysis: Analysis) -> dict[str, str]:
    """Return the name of each workload's metric."""
    return dict(analysis.runs.select("workload", "metric").unique().iter_rows())


def _references(
    analysis: Analysis, look: dict[str, Style], x: pl.Series, x_name: str
) -> Iterator[Trace]:
    """Yield a horizontal line for each centralized method, over the width of a figure."""
    central = analysis.summary.filter(pl.col("centralized"), pl.col("final").is_not_null())
    if x.is_empty():
        return
    for row in central.iter_rows(named=True):
        style = look[row["method"]]._replace(dash="dash")
        meta = mark(row["workload"], row["workers"], row["method"], x_name, row["metric"])
        ends = [float(str(x.min())), float(str(x.max()))]
        trace = line(style, ends, [row["final"]] * 2, meta, "%{y:.4g}")
        yield trace | {"mode": "lines"}
