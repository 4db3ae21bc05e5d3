"""The figure of results against the learning rate."""

from __future__ import annotations

import polars as pl

from gossamer.bench.analysis import Analysis
from gossamer.bench.report.figure import Figure, series
from gossamer.bench.report.style import Style
from gossamer.bench.report.traces import Trace, band, line, mark, points


def sensitivity_figure(analysis: Analysis, look: dict[str, Style]) -> Figure:
    """Return the metric of trials against the learning rate, a curve per method."""
    traces: list[Trace] = []
    best = {
        (row["workload"], row["workers"], row["method"]): row["best"]
        for row in analysis.tuning.iter_rows(named=True)
    }
    for key, curve in series(analysis.sensitivity):
        style, metric = look[key[2]], str(curve["metric"][0])
        meta = mark(*key, "learning rate", f"{metric} on validation samples")
        known = curve.filter(pl.col("validation").is_not_null())
        if (known["trials"] > 1).any():
            bounds = (known["validation_low"], known["validation_high"])
            traces.append(band(style, known["lr"], *bounds, meta))
        hover = "rate %{x:.4~g}: %{y:.4g}"
        traces.append(line(style, known["lr"], known["validation"], meta, hover, markers=40))
        chosen = known.filter(pl.col("lr") == best[key])
        ring = points(style, chosen["lr"], chosen["validation"], meta, f"best {hover}")
        ring["marker"] |= {"symbol": "circle-open", "size": 15, "line": {"width": 2}}
        traces.append(ring | {"showlegend": False})
        traces += _diverged(curve, style, meta)
    return Figure(
        "sensitivity",
        "Result against the learning rate",
        "Metric of trials on validation samples, mean over seeds, band from the lowest seed to the "
        "highest. The ring marks the rate of the final runs. A cross is a rate at which a trial "
        "diverged, drawn at the worst metric of the method. A flat curve needs little tuning.",
        traces,
        {"xaxis": {"type": "log"}},
    )


def _diverged(curve: pl.DataFrame, style: Style, meta: dict[str, object]) -> list[Trace]:
    gone = curve.filter(pl.col("validation").is_null())["lr"]
    if gone.is_empty():
        return []
    known = curve["validation"]
    worst = known.min() if curve["higher_is_better"][0] else known.max()
    at = [float(str(worst)) if worst is not None else 0.0] * len(gone)
    trace = points(style, gone, at, meta, "rate %{x:.4~g}: diverged")
    trace["marker"] |= {"symbol": "x-thin-open", "size": 11, "line": {"width": 2}}
    return [trace | {"showlegend": False}]
