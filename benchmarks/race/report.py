"""From points on curves to who is first, as a table and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from benchmarks.race.methods import REFERENCE
from gossamer.charts import page
from gossamer.charts.theme import PALETTE


class Point(NamedTuple):
    """Where a method was."""

    rate: str
    method: str
    step: int
    seconds: float
    loss: float


def seconds_to(points: Sequence[Point], loss: float) -> float | None:
    """Return when a curve first came to a loss, between two points by a straight line.

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


def table(points: Sequence[Point], reference_steps: int) -> Table:
    """Return who takes how long to the loss that DDP has after so many steps."""
    shown = Table("rate", "method", "ms/step", "last loss", f"s to {REFERENCE}'s loss", "of DDP's")
    for rate in dict.fromkeys(point.rate for point in points):
        curves = curves_at(points, rate)
        ends = [p for p in curves.get(REFERENCE, []) if p.step <= reference_steps]
        if not ends:
            continue
        for method, curve in curves.items():
            last, reached = curve[-1], seconds_to(curve, ends[-1].loss)
            shown.add_row(
                rate,
                method,
                f"{1e3 * last.seconds / max(1, last.step):.0f}",
                f"{last.loss:.3f}",
                "not reached" if reached is None else f"{reached:.1f}",
                "" if reached is None else f"{reached / ends[-1].seconds:.2f}",
            )
    return shown


def curves_at(points: Sequence[Point], rate: str) -> dict[str, list[Point]]:
    """Return the points of each method at one rate."""
    curves: dict[str, list[Point]] = {}
    for point in points:
        if point.rate == rate:
            curves.setdefault(point.method, []).append(point)
    return curves


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
                line={"color": PALETTE[methods.index(method) % len(PALETTE)]},
                row=row,
                col=1,
            )
    figure.update_xaxes(title_text="seconds of training")
    figure.update_yaxes(title_text="loss of the mean replica")
    figure.update_layout(width=760, height=340 * len(rates) + 80)
    page.save(figure, path)
