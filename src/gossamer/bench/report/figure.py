"""A figure as a value: its traces in all their filters at once, and how to read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import polars as pl

from gossamer.bench.analysis.comparison import SETTING
from gossamer.bench.report.traces import Trace


class Figure(NamedTuple):
    """A figure with the traces of all filters and options."""

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
    """The menus of the figure: for each, its options and their labels."""


def series(frame: pl.DataFrame) -> Iterator[tuple[tuple[str, int, str], pl.DataFrame]]:
    """Yield the rows of each workload, scale and method."""
    for (workload, workers, method), group in frame.group_by(
        [*SETTING, "method"], maintain_order=True
    ):
        yield (str(workload), int(str(workers)), str(method)), group
