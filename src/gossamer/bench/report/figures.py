"""Tables to figures: plain plotly traces, each marked with what it shows.

The marks (``meta``) are what the page filters by: workload, scale, method, and a choice that some
figures offer. The same traces are written as images. Long series are thinned here, and only here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import polars as pl

from gossamer.bench.analysis import MEASURES, PHASES, Analysis
from gossamer.bench.analysis.comparison import SETTING, mean_curves
from gossamer.bench.analysis.observations import LEAST
from gossamer.bench.report.style import Style, faded, styles

Trace = dict[str, Any]

_POINTS = 60
"""The most points of a curve on the page."""

_TENSORS = 6
"""The most tensors whose dispersion can be looked at one by one."""

_MANY_SERIES = 60
"""With more, tensors cannot be looked at one by one."""

_ASIDE = 0.3
"""The breadth of all methods at one scale, in powers of two; less where scales lie closer."""

_ROLES: dict[str, str] = {
    "average": "average model",
    "replicas_mean": "replicas, mean",
    "replicas_worst": "replicas, worst",
}


class Figure(NamedTuple):
    """What is drawn, in all its filters at once."""

    name: str
    title: str
    reading: str
    """How to read it, a sentence or two."""

    traces: list[Trace]
    axes: dict[str, Any]
    """Plotly's ``xaxis`` and ``yaxis``."""

    faceted: bool = True
    """Whether scales are drawn side by side."""

    choices: dict[str, dict[str, str]] = {}  # noqa: RUF012 - never changed
    """What can be chosen in the figure: for each choice its options and what they are called."""


def method_styles(runs: pl.DataFrame) -> dict[str, Style]:
    """Return the look of every method of an experiment, in the order of its list."""
    named = runs.select("method", "centralized").unique(maintain_order=True)
    central = named.filter(pl.col("centralized"))["method"].to_list()
    return styles([name for name in named["method"] if name not in central], central)


def figures(analysis: Analysis) -> list[Figure]:
    """Return all figures that there are data for."""
    look = method_styles(analysis.runs)
    shown = _shown(analysis.runs)
    drawn = [
        _scale(analysis, look),
        _learning(analysis, shown, look),
        _connections(analysis, look),
        _accuracy_by_dispersion(analysis, look),
        _dispersion_by_step(analysis, shown, look),
        _distance(analysis, shown, look),
        _decisions(analysis, shown, look),
        _per_byte(analysis, shown, look),
        _per_second(analysis, shown, look),
    ]
    return [figure for figure in drawn if figure.traces]


def _shown(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the runs whose curves are drawn: those that are done, or where there is none, all."""
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
        meta = _meta(str(workload), None, str(method), "workers", ordered["metric"][0])
        # Moved a little to the side, so that intervals do not lie on each other.
        aside = 2 ** (breadth * (list(look).index(str(method)) / max(1, len(look) - 1) - 0.5))
        x = ordered["workers"] * aside
        trace = _line(look[str(method)], x, ordered["final"], meta, markers=20)
        trace["customdata"] = ordered["workers"].to_list()
        trace["hovertemplate"] = _hover(method, "%{customdata} workers: %{y:.4g}")
        if ordered["final_low"].is_not_null().any():
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": _numbers(ordered["final_high"] - ordered["final"]),
                "arrayminus": _numbers(ordered["final"] - ordered["final_low"]),
                "thickness": 1,
                "width": 3,
            }
        meta["scales"] = ordered["workers"].to_list()
        traces.append(trace)
    ticks = {"tickvals": scales, "ticktext": [str(scale) for scale in scales]}
    return Figure(
        "scale",
        "Result against scale",
        "Final metric of the averaged model, mean over seeds with its 95 % interval. A line that "
        "falls to the right loses with scale.",
        traces,
        {"xaxis": {"type": "log", **ticks}},
        faceted=False,
    )


def _learning(analysis: Analysis, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    return _curves_of(analysis, shown, look, "step")._replace(
        name="learning",
        title="Learning curves",
        reading="Lines are means over seeds; the band reaches from the lowest seed to the highest. "
        "Where replicas lie far below the average model, workers disagree.",
    )


def _per_byte(analysis: Analysis, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    return _curves_of(analysis, shown, look, "bytes_sent")._replace(
        name="bytes",
        title="Result per byte sent",
        reading="The same curves against what the average worker has sent. Further up and to the "
        "left is better: more learned for less traffic. The axis is logarithmic.",
    )


def _per_second(analysis: Analysis, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    real = shown.filter(pl.col("engine") == "distributed")
    return _curves_of(analysis, real, look, "train_s")._replace(
        name="seconds",
        title="Result per second, on processes",
        reading="The same curves against measured time in training steps. Only runs on real "
        "processes: the seconds of a simulation are those of the simulator.",
    )


_SPENT = {"step": "steps", "bytes_sent": "MB sent per worker", "train_s": "seconds of training"}


def _curves_of(
    analysis: Analysis, runs: pl.DataFrame, look: dict[str, Style], spent: str
) -> Figure:
    traces: list[Trace] = []
    metrics = _metrics(analysis)
    curves = mean_curves(analysis.evaluations, runs)
    unit = 1e6 if spent == "bytes_sent" else 1
    for (workload, workers, method), curve in _series(curves):
        for role in _ROLES:
            kept = _thin(curve.filter(pl.col(role).is_not_null()))
            if kept.is_empty():
                continue
            x = kept[spent] / unit
            meta = _meta(workload, workers, method, _SPENT[spent], metrics[workload], show=role)
            if (kept["runs"] > 1).any():
                bounds = (kept[f"{role}_low"], kept[f"{role}_high"])
                traces.append(_band(look[method], x, *bounds, meta))
            trace = _line(look[method], x, kept[role], meta)
            unit_name = _SPENT[spent].removesuffix(" per worker")
            trace["hovertemplate"] = _hover(method, f"%{{x:.4~g}} {unit_name}: %{{y:.4g}}")
            traces.append(trace)
    axes: dict[str, Any] = {"xaxis": {"type": "log"}} if spent == "bytes_sent" else {}
    return Figure("", "", "", traces, axes, choices={"show": _ROLES})


def _connections(analysis: Analysis, look: dict[str, Style]) -> Figure:
    done = analysis.runs.filter(pl.col("final").is_not_null(), ~pl.col("centralized"))
    done = done.filter(pl.col("connections").is_not_null())
    x_name = "neighbours heard per step"
    traces: list[Trace] = []
    for (workload, workers, method), group in _series(done):
        meta = _meta(workload, workers, method, x_name, group["metric"][0])
        trace = _points(look[method], group["connections"], group["final"], meta)
        trace["hovertemplate"] = _hover(method, "%{x:.4~g} neighbours per step: %{y:.4g}")
        traces.append(trace)
    traces += _references(analysis, look, done["connections"], x_name)
    return Figure(
        "connections",
        "Result against connections",
        "One point per run. Neighbours heard per step are the mean over training: a graph's degree "
        "times its rounds. The dashed grey line is centralized training. Points that rise to the "
        "right: more connections go with a better result.",
        traces,
        {"xaxis": {"type": "log"}},
    )


def _accuracy_by_dispersion(analysis: Analysis, look: dict[str, Style]) -> Figure:
    done = analysis.runs.filter(pl.col("final").is_not_null(), ~pl.col("centralized"))
    joined = analysis.dispersion_by_run.join(done, on="run_id", maintain_order="left")
    traces: list[Trace] = []
    for (workload, workers, method), group in _series(joined):
        for (phase,), part in group.group_by(["phase"], maintain_order=True):
            for measure, x_name in MEASURES.items():
                chosen = {"measure": measure, "phase": str(phase)}
                meta = _meta(workload, workers, method, x_name, part["metric"][0], **chosen)
                trace = _points(look[method], part[measure], part["final"], meta)
                trace["hovertemplate"] = _hover(method, "dispersion %{x:.3g}: %{y:.4g}")
                traces.append(trace)
    traces += _fit_lines(analysis)
    return Figure(
        "dispersion",
        "Result against dispersion",
        "One point per run: how unequal the norms of parameter tensors were across replicas, just "
        "before averaging, in a third of training (geometric mean over tensors). The line is a "
        "least-squares fit over all methods at that scale. Points that fall to the right: replicas "
        "that differ more go with a worse result.",
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
        meta = _meta(*named, MEASURES[row["measure"]], metrics[row["workload"]], **chosen)
        yield {
            "type": "scatter",
            "mode": "lines",
            "x": _numbers(ends),
            "y": _numbers(row["intercept"] + row["slope"] * math.log10(x) for x in ends),
            "name": "fit",
            "line": {"color": "#808080", "width": 1.5},
            "hovertemplate": f"fit: {row['slope']:+.3g} per factor 10, R² {row['r2']:.2f}"
            "<extra></extra>",
            "meta": meta,
        }


def _dispersion_by_step(analysis: Analysis, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    named = shown.select("run_id", *SETTING, "method")
    joined = analysis.dispersion.join(named, on="run_id", maintain_order="left").with_columns(
        pl.col(list(MEASURES)).clip(lower_bound=LEAST).log10()
    )
    series = shown.select(*SETTING, "method").n_unique()
    tensors: list[str] = []
    if series <= _MANY_SERIES:
        tensors = joined["tensor"].unique(maintain_order=True).to_list()[:_TENSORS]
    options = {"all": "all tensors", **{name: name for name in tensors}}
    traces: list[Trace] = []
    for tensor in options:
        part = joined if tensor == "all" else joined.filter(pl.col("tensor") == tensor)
        by_step = part.group_by([*SETTING, "method", "step"], maintain_order=True).agg(
            pl.col(list(MEASURES)).mean()
        )
        for (workload, workers, method), curve in _series(by_step):
            kept = _thin(curve.sort("step"))
            for measure, y_name in MEASURES.items():
                chosen = {"measure": measure, "tensor": tensor}
                meta = _meta(workload, workers, method, "steps", y_name, **chosen)
                trace = _line(look[method], kept["step"], 10 ** kept[measure], meta)
                trace["hovertemplate"] = _hover(method, "step %{x}: %{y:.3g}")
                traces.append(trace)
    return Figure(
        "dispersion-by-step",
        "Dispersion over training",
        "How unequal the norms of tensors are across replicas, just before averaging; geometric "
        "mean over seeds, and over tensors or of one. Graphs with more connections should lie "
        "lower, most clearly early.",
        traces,
        {"yaxis": {"type": "log", "exponentformat": "power", "dtick": 1}},
        choices={"measure": MEASURES, "tensor": options},
    )


def _distance(analysis: Analysis, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    traces: list[Trace] = []
    mixing = shown.filter(~pl.col("centralized"))
    for (workload, workers, method), curve in _series(_mean_steps(analysis, mixing)):
        kept = _thin(curve.filter(pl.col("distance") > 0))
        meta = _meta(workload, workers, method, "steps", "consensus distance Ξ")
        if (kept["runs"] > 1).any():
            bounds = (kept["distance_low"], kept["distance_high"])
            traces.append(_band(look[method], kept["step"], *bounds, meta))
        trace = _line(look[method], kept["step"], kept["distance"], meta)
        trace["hovertemplate"] = _hover(method, "step %{x}: Ξ %{y:.3g}")
        traces.append(trace)
    return Figure(
        "distance",
        "Consensus distance",
        "How far workers' parameters are from their mean, root mean square. It follows the "
        "learning rate; a graph that mixes better keeps it lower. Band: lowest to highest seed.",
        traces,
        {"yaxis": {"type": "log", "exponentformat": "power"}},
    )


_DECISIONS = {
    "degree": "neighbours k",
    "rounds": "gossip rounds per step",
    "target": "target distance",
}


def _decisions(analysis: Analysis, shown: pl.DataFrame, look: dict[str, Style]) -> Figure:
    traces: list[Trace] = []
    deciding = _mean_steps(analysis, shown.filter(~pl.col("centralized")))
    for (workload, workers, method), curve in _series(deciding):
        controlled = curve["target"].is_not_null().any()
        if curve["degree"].n_unique() == 1 and curve["rounds"].n_unique() == 1 and not controlled:
            continue
        for what, y_name in _DECISIONS.items():
            kept = _thin(curve.filter(pl.col(what).is_finite()))
            if kept.is_empty():
                continue
            meta = _meta(workload, workers, method, "steps", y_name, show=what)
            trace = _line(look[method], kept["step"], kept[what], meta)
            trace["line"]["shape"] = "hv"
            trace["hovertemplate"] = _hover(method, f"step %{{x}}: %{{y:.3~g}} {y_name}")
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


# - Parts


def _series(frame: pl.DataFrame) -> Iterator[tuple[tuple[str, int, str], pl.DataFrame]]:
    for (workload, workers, method), group in frame.group_by(
        [*SETTING, "method"], maintain_order=True
    ):
        yield (str(workload), int(str(workers)), str(method)), group


def _metrics(analysis: Analysis) -> dict[str, str]:
    """Return what each workload is judged by."""
    return dict(analysis.runs.select("workload", "metric").unique().iter_rows())


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
            pl.col("distance").mean(),
            pl.col("distance").min().alias("distance_low"),
            pl.col("distance").max().alias("distance_high"),
        )
        .sort([*SETTING, "method", "step"], maintain_order=True)
    )


def _references(
    analysis: Analysis, look: dict[str, Style], x: pl.Series, x_name: str
) -> Iterator[Trace]:
    """Yield a level line for each centralized method, over the breadth of a figure."""
    central = analysis.summary.filter(pl.col("centralized"), pl.col("final").is_not_null())
    if x.is_empty():
        return
    for row in central.iter_rows(named=True):
        style = look[row["method"]]._replace(dash="dash")
        meta = _meta(row["workload"], row["workers"], row["method"], x_name, row["metric"])
        ends = [float(str(x.min())), float(str(x.max()))]
        trace = _line(style, ends, [row["final"]] * 2, meta)
        trace["hovertemplate"] = _hover(row["method"], "%{y:.4g}")
        yield trace | {"mode": "lines"}


def _meta(
    workload: str, workers: int | None, method: str | None, x: str, y: str, **choice: str
) -> dict[str, Any]:
    return {
        "workload": workload,
        "workers": workers,
        "method": method,
        "x": x,
        "y": y,
        "choice": choice,
    }


def _line(
    style: Style,
    x: Iterable[float | None],
    y: Iterable[float | None],
    meta: dict[str, Any],
    markers: int = 6,
) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": _numbers(x),
        "y": _numbers(y),
        "name": escape(meta["method"]),
        "line": {"color": style.color, "dash": style.dash, "width": 2},
        "marker": {
            "color": style.color,
            "symbol": style.symbol,
            "size": 7,
            "maxdisplayed": markers,
        },
        "meta": meta,
    }


def _points(
    style: Style, x: Iterable[float | None], y: Iterable[float | None], meta: dict[str, Any]
) -> Trace:
    marker = {"color": style.color, "symbol": style.symbol, "size": 9, "opacity": 0.85}
    return {
        "type": "scatter",
        "mode": "markers",
        "x": _numbers(x),
        "y": _numbers(y),
        "name": escape(meta["method"]),
        "marker": marker,
        "meta": meta,
    }


def _band(
    style: Style, x: pl.Series, low: pl.Series, high: pl.Series, meta: dict[str, Any]
) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": _numbers([*x, *reversed(x)]),
        "y": _numbers([*high, *reversed(low)]),
        "fill": "toself",
        "fillcolor": faded(style.color, 0.16),
        "line": {"width": 0, "color": style.color},
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": meta,
    }


def _hover(method: object, text: str) -> str:
    return f"<b>{escape(str(method))}</b><br>{text}<extra></extra>"


def _thin(frame: pl.DataFrame, most: int = _POINTS) -> pl.DataFrame:
    """Return at most so many rows at even distances, the first and the last among them."""
    if len(frame) <= most:
        return frame
    places = sorted({round(i * (len(frame) - 1) / (most - 1)) for i in range(most)})
    return frame[places]


def _numbers(values: Iterable[float | None]) -> Sequence[float | None]:
    """Return values with six digits, which is more than a screen shows; None where not finite."""
    return [
        None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
        for value in values
    ]
