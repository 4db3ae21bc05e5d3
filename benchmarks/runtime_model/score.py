"""Errors of predictions, and the quality of the recommendations based on them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from rich.table import Table

NOT_OVERLAPPED = ", atc"
"""In the name of a method that waits for its exchange."""

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
    measured_ms: float | None
    """Mean over hosts and steps, median of rounds; None where the method failed."""

    lowest_ms: float | None
    highest_ms: float | None
    predicted_ms: float
    cpu: float
    saturated: bool
    advised: bool
    """Whether the plan chose it, of the methods that were measured and do not wait."""

    @property
    def waits(self) -> bool:
        """Whether its exchange is not overlapped: the plan that advises is of those that are."""
        return NOT_OVERLAPPED in self.method

    @property
    def error(self) -> float:
        """Relative error of the prediction; not a number where nothing was measured."""
        return self.predicted_ms / (self.measured_ms or math.nan) - 1

    @property
    def setting(self) -> tuple[int, str, float]:
        """The fields that compared methods share."""
        return self.hosts, self.network, self.variance


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Over all points that count."""

    points: int
    saturated: int
    """Left out: measured with saturated processors."""

    failed: int
    """Left out: not measured."""

    median_error: float
    worst_error: float
    pairs: int
    """Of methods in one setting, more than 5 % apart."""

    ranked_right: float
    settings: int
    """Settings whose recommended method counts."""

    worst_advice: float
    """How much slower the recommended method was than the fastest that counts and that the plan
    could choose, at worst."""

    def to_dict(self) -> dict[str, Any]:
        """Return it for a JSON line; null where there is nothing to score."""
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in asdict(self).items()
        }


def score(points: Sequence[Point]) -> Score:
    """Return the score of predictions."""
    counted = [(p, p.measured_ms) for p in points if p.measured_ms is not None and not p.saturated]
    errors = [abs(point.error) for point, _ in counted]
    right: list[bool] = []
    slower: list[float] = []
    for setting in dict.fromkeys(point.setting for point, _ in counted):
        own = [(point, ms) for point, ms in counted if point.setting == setting]
        for (a, a_ms), (b, b_ms) in itertools.combinations(own, 2):
            if max(a_ms, b_ms) > (1 + APART) * min(a_ms, b_ms):
                right.append((a_ms - b_ms) * (a.predicted_ms - b.predicted_ms) > 0)
        choices = [(point, ms) for point, ms in own if not point.waits]
        fastest = min((ms for _, ms in choices), default=math.nan)
        slower += [ms / fastest - 1 for point, ms in choices if point.advised]
    return Score(
        points=len(counted),
        saturated=sum(point.saturated for point in points),
        failed=sum(point.measured_ms is None for point in points),
        median_error=statistics.median(errors or [math.nan]),
        worst_error=max(errors, default=math.nan),
        pairs=len(right),
        ranked_right=sum(right) / len(right) if right else math.nan,
        settings=len(slower),
        worst_advice=max(slower, default=math.nan),
    )


def table(points: Sequence[Point]) -> Table:
    """Return the points; a star marks saturated processors, an arrow the recommended method."""
    table = Table("hosts", "network", "variance", "method")
    for heading in ("measured", "range", "predicted", "error", "CPU"):
        table.add_column(heading, justify="right")
    for p in points:
        table.add_row(
            str(p.hosts),
            p.network,
            f"{p.variance:g}",
            f"{'→ ' if p.advised else ''}{p.method}",
            f"{_ms(p.measured_ms)}{'*' if p.saturated else ''}",
            f"{_ms(p.lowest_ms)}–{_ms(p.highest_ms)}",
            _ms(p.predicted_ms),
            f"{p.error:+.1%}",
            f"{p.cpu:.0%}",
        )
    return table


def _ms(milliseconds: float | None) -> str:
    return "failed" if milliseconds is None else f"{milliseconds:.0f}"
