"""Turn points of loss curves into times to a loss, as a table and a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from benchmarks.race.methods import REFERENCE
from gossamer.charts import page
from gossamer.charts.theme import PALETTE

_OURS, _OTHERS = PALETTE[0], "#c3cad2"


class Point(NamedTuple):
    """Loss of a method at a step."""

    rate: str
    method: str
    step: int
    seconds: float
    loss: float


def seconds_to(points: Sequence[Point], loss: float) -> float | None:
    """Return when a curve first reaches a loss, by linear interpolation.

    >>> curve = [Point("", "", 0, 0.0, 3.0), Point("", "", 1, 10.0, 1.0)]
    >>> seconds_to(curve, 2.0)
    5.0
    """
    before = None
    for point in points:
        if point.loss <= loss:
            if before is None:
                return point.seconds
            share = (before.loss - loss) / (before.loss - point.loss)
            return before.seconds + share * (point.seconds - before.seconds)
        before = point
    return None


def table(points: Sequence[Point]) -> Table:
    """Return the times of methods to DDP's final loss."""
    shown = Table("rate", "method", "ms/step", "last loss", f"s to {REFERENCE}'s loss", "of DDP's")
    for rate in dict.fromkeys(point.rate for point in points):
        times = times_to_end(points, rate)
        for method, curve in curves_at(points, rate).items():
            last, reached = curve[-1], times.get(method)
            shown.add_row(
                rate,
                method,
                f"{1e3 * last.seconds / max(1, last.step):.0f}",
                f"{last.loss:.3f}",
                "not reached" if reached is None else f"{reached:.1f}",
                "" if reached is None else f"{reached / times[REFERENCE]:.2f}",
            )
    return shown


def times_to_end(points: Sequence[Point], rate: str) -> dict[str, float]:
    """Return the time to DDP's final loss of each method that reaches it."""
    curves = curves_at(points, rate)
    if REFERENCE not in curves:
        return {}
    end = curves[REFERENCE][-1]
    found = {method: seconds_to(curve, end.loss) for method, curve in curves.items()}
    found[REFERENCE] = end.seconds
    return {method: seconds for method, seconds in found.items() if seconds is not None}


def curves_at(points: Sequence[Point], rate: str) -> dict[str, list[Point]]:
    """Return the points of each method at one rate."""
    curves: dict[str, list[Point]] = {}
    for point in points:
        if point.rate == rate:
            curves.setdefault(point.method, []).append(point)
    return curves


def _line_of(index: int) -> dict[str, str]:
    return {
        "color": PALETTE[index % len(PALETTE)],
        "dash": "solid" if index < len(PALETTE) else "dash",
    }


def draw(points: Sequence[Point], path: Path) -> None:
    """Write loss against seconds, a panel per rate."""
    rates = list(dict.fromkeys(point.rate for point in points))
    figure = page.subplots(rows=len(rates), cols=1, subplot_titles=rates)
    methods = list(dict.fromkeys(point.method for point in points))
    for row, rate in enumerate(rates, start=1):
        for method, curve in curves_at(points, rate).items():
            figure.add_scatter(
                x=[point.seconds for point in curve],
                y=[point.loss for point in curve],
                name=method,
                legendgroup=method,
                showlegend=row == 1,
                line=_line_of(methods.index(method)),
                row=row,
                col=1,
            )
    figure.update_xaxes(title_text="seconds of training")
    # From the second point on: the first is far above the rest.
    later = [point.loss for point in points if point.step]
    if later:
        figure.update_yaxes(range=[min(later) - 0.03, max(later) + 0.03])
    figure.update_yaxes(title_text="loss of the mean replica")
    figure.update_layout(width=760, height=340 * len(rates) + 80)
    page.save(figure, path)


def draw_bars(seconds: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Write the time to DDP's loss as bars, a panel per rate, with its own background.

    Args:
        seconds: of each seed, by rate and method; infinite where a seed never has the loss. Bars
            are medians, lines the range over seeds.
        path: .html, .png or .svg.
    """
    methods = [*dict.fromkeys(name for times in seconds.values() for name in times)][::-1]
    figure = page.subplots(
        rows=1,
        cols=len(seconds),
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=[f"links of {rate.removesuffix('mbit')} Mbit/s" for rate in seconds],
    )
    for column, times in enumerate(seconds.values(), start=1):
        of_all = {name: times.get(name, [math.inf]) for name in methods}
        shown = {name: _median_and_range(each) for name, each in of_all.items()}
        ends = [high for _, _, high in shown.values()]
        figure.add_bar(
            x=[median for median, _, _ in shown.values()],
            y=methods,
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [high - median for median, _, high in shown.values()],
                "arrayminus": [median - low for median, low, _ in shown.values()],
                "visible": any(low < high for _, low, high in shown.values()),
                "thickness": 1,
                "width": 2,
            },
            orientation="h",
            marker_color=[_OURS if "gossamer" in name else _OTHERS for name in methods],
            showlegend=False,
            row=1,
            col=column,
        )
        # Beside the range, where a bar's own text would be drawn through by its line.
        figure.add_scatter(
            x=ends,
            y=methods,
            mode="text",
            text=[f"  {_said(each)}" for each in of_all.values()],
            textposition="middle right",
            showlegend=False,
            cliponaxis=False,
            row=1,
            col=column,
        )
        figure.update_xaxes(
            title_text="seconds to DDP's last loss", range=[0, 1.4 * (max(ends) or 1.0)], col=column
        )
    figure.update_layout(
        width=860,
        height=90 + 32 * len(methods),
        margin={"l": 170, "r": 20, "t": 40, "b": 50},
    )
    page.save(figure, path)


def _median_and_range(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the least and the most to draw; zeros where the median is infinite."""
    median = statistics.median(seconds)
    if math.isinf(median):
        return 0.0, 0.0, 0.0
    return median, min(seconds), max(filter(math.isfinite, seconds))


def _said(seconds: Sequence[float]) -> str:
    reached = sum(map(math.isfinite, seconds))
    median = statistics.median(seconds)
    said = "not in these steps" if math.isinf(median) else f"{median:.0f} s"
    return said if reached in (0, len(seconds)) else f"{said} ({reached} of {len(seconds)} seeds)"
