"""How far predictions are from measurements, and whether they would have advised well."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from rich.table import Table

APART = 0.05
"""Methods whose measured times differ by less may be ranked either way."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One method in one setting."""

    hosts: int
    network: str
    variance: float
    method: str
    measured_ms: float
    lowest_ms: float
    highest_ms: float
    predicted_ms: float
    cpu: float
    saturated: bool
    advised: bool
    """Whether the plan chose it, of the methods that were measured."""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def setting(self) -> tuple[int, str, float]:
        """What all methods that are compared have in common."""
        return self.hosts, self.network, self.variance


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Over all points that count."""

    points: int
    left_out: int
    """Measured with saturated processors."""

    median_error: float
    worst_error: float
    pairs: int
    """Of methods in one setting, more than 5 % apart."""

    ranked_right: float
    settings: int
    worst_advice: float
    """By how much the advised method was slower than the fastest measured one, at worst."""

    def to_dict(self) -> dict[str, Any]:
        """Return it for a JSON line; null where there is nothing to score."""
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in asdict(self).items()
        }


def score(points: Sequence[Point]) -> Score:
    """Return how good predictions were."""
    counted = [p for p in points if not p.saturated and math.isfinite(p.measured_ms)]
    errors = [abs(point.error) for point in counted]
    right: list[bool] = []
    slower: list[float] = []
    for setting in dict.fromkeys(point.setting for point in counted):
        own = [point for point in counted if point.setting == setting]
        for a, b in itertools.combinations(own, 2):
            if max(a.measured_ms, b.measured_ms) > (1 + APART) * min(a.measured_ms, b.measured_ms):
                right.append((a.measured_ms < b.measured_ms) == (a.predicted_ms < b.predicted_ms))
        fastest = min(point.measured_ms for point in own)
        slower += [point.measured_ms / fastest - 1 for point in own if point.advised]
    return Score(
        points=len(counted),
        left_out=len(points) - len(counted),
        median_error=statistics.median(errors or [math.nan]),
        worst_error=max(errors, default=math.nan),
        pairs=len(right),
        ranked_right=sum(right) / len(right) if right else math.nan,
        settings=len(slower),
        worst_advice=max(slower, default=math.nan),
    )


def table(points: Sequence[Point]) -> Table:
    """Return the points; a star marks saturated processors, an arrow what was advised."""
    table = Table("hosts", "network", "variance", "method")
    for heading in ("measured", "range", "predicted", "error", "CPU"):
        table.add_column(heading, justify="right")
    for p in points:
        table.add_row(
            str(p.hosts),
            p.network,
            f"{p.variance:g}",
            f"{'→ ' if p.advised else ''}{p.method}",
            f"{p.measured_ms:.0f}{'*' if p.saturated else ''}",
            f"{p.lowest_ms:.0f}–{p.highest_ms:.0f}",
            f"{p.predicted_ms:.0f}",
            f"{p.error:+.1%}",
            f"{p.cpu:.0%}",
        )
    return table
