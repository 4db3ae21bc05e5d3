"""Turn raw samples into one row per method, and rows into a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich.table import Table

from benchmarks.cluster.methods import LOCAL
from gossamer.charts import page
from gossamer.charts.theme import REFERENCE

Sample = dict[str, Any]

SATURATED = 0.9
"""Share of the processors' time above which a row measures them rather than the links."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method at one rate: medians over the rounds."""

    method: str
    rate: str
    ms_per_step: float
    """Of the slowest host in each round."""

    ms_lowest: float
    ms_highest: float
    bytes_per_step: float
    """Sent per host, frame headers included."""

    cpu: float
    """Share of the machine's processors in use, by any program."""

    cpu_own: float
    """Share of them that the hosts' processes used; the rest is interrupts and other programs."""

    cpu_ms: float
    """CPU time of a host's own processes per step: that of the method, if compute is emulated."""

    peak_mb: float
    ratio_to_limit: float
    """Time over the larger of local compute and bytes over rate."""

    rounds: int
    saturated: bool
    error: str = ""


def rows(samples: Sequence[Sample], rate: str, rate_bits_s: int) -> list[Row]:
    """Return one row per method, in the order in which they first appear."""
    methods = list(dict.fromkeys(str(sample["method"]) for sample in samples))
    compute_ms = statistics.median(times_of_rounds(samples, LOCAL) or [0.0])
    return [_row(samples, method, rate, rate_bits_s, compute_ms) for method in methods]


def _row(
    samples: Sequence[Sample], method: str, rate: str, rate_bits_s: int, compute_ms: float
) -> Row:
    times = times_of_rounds(samples, method)
    own = [sample for sample in samples if sample["method"] == method]
    errors = [str(sample["error"]) for sample in own if "error" in sample]
    good = [sample for sample in own if "error" not in sample]

    def median(field: str) -> float:
        return statistics.median([float(sample[field]) for sample in good] or [math.nan])

    ms_per_step = statistics.median(times or [math.nan])
    limit_ms = max(compute_ms, median("bytes_per_step") * 8e3 / rate_bits_s)
    return Row(
        method=method,
        rate=rate,
        ms_per_step=ms_per_step,
        ms_lowest=min(times, default=math.nan),
        ms_highest=max(times, default=math.nan),
        bytes_per_step=median("bytes_per_step"),
        cpu=median("cpu"),
        cpu_own=median("cpu_own") * len({sample["rank"] for sample in own}),
        cpu_ms=median("cpu_ms"),
        peak_mb=max((float(sample["peak_mb"]) for sample in good), default=math.nan),
        ratio_to_limit=ms_per_step / limit_ms if limit_ms else math.nan,
        rounds=len(times),
        saturated=median("cpu") > SATURATED,
        error=errors[0] if errors else "",
    )


def times_of_rounds(
    samples: Sequence[Sample], method: str, of_hosts: Callable[[list[float]], float] = max
) -> list[float]:
    """Return ms per step in each round in which the method ran on every host.

    Args:
        samples: of all hosts.
        method: its name.
        of_hosts: reduces the times of all hosts to one; by default the slowest.
    """
    by_round: dict[int, list[float]] = {}
    failed: set[int] = set()
    for sample in samples:
        if sample["method"] == method and "error" in sample:
            failed.add(int(sample["round"]))
        elif sample["method"] == method:
            by_round.setdefault(int(sample["round"]), []).append(float(sample["ms_per_step"]))
    return [of_hosts(times) for round_, times in by_round.items() if round_ not in failed]


def table(rows: Iterable[Row]) -> Table:
    """Return the rows as a table; a star marks those measured with the processors saturated."""
    table = Table("rate", "method", *_COLUMNS)
    for row in rows:
        cells = [column(row) for column in _COLUMNS.values()] if row.rounds else ["failed"]
        table.add_row(row.rate, row.method, *cells)
    return table


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "ms/step": lambda row: f"{row.ms_per_step:.0f}{'*' if row.saturated else ''}",
    "range": lambda row: f"{row.ms_lowest:.0f}-{row.ms_highest:.0f}",
    "MB/step": lambda row: f"{row.bytes_per_step / 1e6:.2f}",
    "CPU": lambda row: f"{row.cpu:.0%}",
    "own CPU": lambda row: f"{row.cpu_own:.0%}",
    "CPU ms/step": lambda row: f"{row.cpu_ms:.0f}",
    "peak MB": lambda row: f"{row.peak_mb:.0f}",
    "to limit": lambda row: f"{row.ratio_to_limit:.2f}",
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the step times as bars, a group per rate; local steps in grey."""
    figure = page.subplots()
    methods = dict.fromkeys(row.method for row in rows)
    for method in methods:
        own = [row for row in rows if row.method == method and row.rounds]
        figure.add_bar(
            x=[row.rate for row in own],
            y=[row.ms_per_step for row in own],
            text=[f"{row.ms_per_step:.0f}" for row in own],
            textposition="outside",
            name="compute alone" if method == LOCAL else method,
            marker_color=REFERENCE if method == LOCAL else None,
        )
    figure.update_yaxes(title_text="ms per step")
    figure.update_xaxes(title_text="rate of each host's link", type="category")
    figure.update_layout(
        width=720,
        height=340,
        legend={"orientation": "h", "y": 1.15},
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
    )
    page.save(figure, path)
