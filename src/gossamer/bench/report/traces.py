"""Plotly traces as plain values: lines, points and bands in a method's style, with metadata."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TypeAlias

import polars as pl

from gossamer.bench.report.style import Style, faded

Trace: TypeAlias = dict[str, Any]

_MOST_POINTS = 60
"""The most points of a curve on the page."""


def mark(
    workload: str | None, workers: int | None, method: str | None, x: str, y: str, **choice: str
) -> dict[str, Any]:
    """Return the metadata that the page filters and labels a trace by."""
    return {
        "workload": workload,
        "workers": workers,
        "method": method,
        "x": x,
        "y": y,
        "choice": choice,
    }


def line(
    style: Style,
    x: Iterable[float | None],
    y: Iterable[float | None],
    meta: dict[str, Any],
    hover: str,
    markers: int = 6,
) -> Trace:
    """Return a curve with some markers; ``hover`` is plotly's hover template."""
    marker = {"color": style.color, "symbol": style.symbol, "size": 7, "maxdisplayed": markers}
    look = {"color": style.color, "dash": style.dash, "width": 2}
    return _named("lines+markers", x, y, meta, hover) | {"line": look, "marker": marker}


def points(
    style: Style,
    x: Iterable[float | None],
    y: Iterable[float | None],
    meta: dict[str, Any],
    hover: str,
) -> Trace:
    """Return points without a line."""
    marker = {"color": style.color, "symbol": style.symbol, "size": 9, "opacity": 0.85}
    return _named("markers", x, y, meta, hover) | {"marker": marker}


def _named(
    mode: str,
    x: Iterable[float | None],
    y: Iterable[float | None],
    meta: dict[str, Any],
    hover: str,
) -> Trace:
    method = escape(meta["method"])
    return {
        "type": "scatter",
        "mode": mode,
        "x": numbers(x),
        "y": numbers(y),
        "name": method,
        "hovertemplate": f"<b>{method}</b><br>{hover}<extra></extra>",
        "meta": meta,
    }


def band(
    style: Style, x: pl.Series, low: pl.Series, high: pl.Series, meta: dict[str, Any]
) -> Trace:
    """Return the area between two curves."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": numbers([*x, *reversed(x)]),
        "y": numbers([*high, *reversed(low)]),
        "fill": "toself",
        "fillcolor": faded(style.color, 0.16),
        "line": {"width": 0, "color": style.color},
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": meta,
    }


def thin(frame: pl.DataFrame, most: int = _MOST_POINTS) -> pl.DataFrame:
    """Return at most so many rows, evenly spaced, with the first and the last."""
    if len(frame) <= most:
        return frame
    places = sorted({round(i * (len(frame) - 1) / (most - 1)) for i in range(most)})
    return frame[places]


def numbers(values: Iterable[float | None]) -> Sequence[float | None]:
    """Return values with six digits, enough for any screen; None where not finite."""
    return [
        None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
        for value in values
    ]
