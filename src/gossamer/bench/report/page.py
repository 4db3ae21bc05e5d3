"""Render the page: a self-contained file, or only the content for a page that is already open."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import polars as pl
from markupsafe import Markup

from gossamer.bench.analysis import MEASURES, Analysis
from gossamer.bench.analysis.mixing import LONGEST_PERIOD, schedule_of
from gossamer.bench.analysis.targets import COSTS
from gossamer.bench.report import words
from gossamer.bench.report.figures import Figure, figures, method_styles
from gossamer.bench.report.reading import Results
from gossamer.bench.report.remarks import remarks
from gossamer.charts.page import templates, to_script
from gossamer.errors import UserError
from gossamer.picture import thumbnail
from gossamer.topology import Schedule

if TYPE_CHECKING:
    from jinja2 import Environment

_MOST_GRAPHS = 60
_MOST_ROWS = 400
"""Rows of a table on the page; --tables writes all."""


def render(
    results: Results, refresh_s: float | None = None, made: dict[str, Any] | None = None
) -> str:
    """Return the page.

    Args:
        results: what it shows.
        refresh_s: how often it polls the server that it came from; None for a file.
        made: its content, where it is rendered already.
    """
    template = _templates().get_template("page.html")
    return template.render(
        **(made or content(results)),
        results=results,
        refresh_s=refresh_s,
        connect="'self'" if refresh_s else "'none'",
    )


def content(results: Results) -> dict[str, Any]:
    """Return what a page shows: ``html``, and ``data`` as JSON for its figures and filter."""
    analysis = results.analysis
    drawn = figures(analysis, results.norms)
    html = (
        _templates()
        .get_template("content.html")
        .render(
            results=results,
            analysis=analysis,
            figures={figure.name: figure for figure in drawn},
            headlines=words.headlines(analysis),
            findings=words.findings(analysis),
            ranks=_mean_ranks(analysis),
            remarks=remarks(analysis),
            correlations=_correlations(analysis),
            effects=_effects(analysis),
            slopes=words.slopes,
            graphs=_graphs(results),
            trial_facts=_trial_facts(results),
            most=_MOST_ROWS,
            measures=MEASURES,
            half=words.half,
            number=words.number,
            megabytes=words.megabytes,
            costs=COSTS,
            target_costs=_target_costs(analysis),
            significant=words.SIGNIFICANT,
        )
    )
    return {"html": Markup(html), "data": _data(analysis, drawn)}


def _data(analysis: Analysis, drawn: list[Figure]) -> Markup:
    runs = analysis.all_runs
    data = {
        "workloads": runs["workload"].unique(maintain_order=True).to_list(),
        "scales": {
            str(workload): sorted(set(group["workers"].to_list()))
            for (workload,), group in runs.group_by(["workload"], maintain_order=True)
        },
        "methods": {name: style._asdict() for name, style in method_styles(runs).items()},
        "figures": {figure.name: figure._asdict() for figure in drawn},
    }
    return to_script(data)


@lru_cache(maxsize=1)
def _templates() -> Environment:
    environment = templates("gossamer.bench.report")
    environment.filters |= {
        "number": words.number,
        "megabytes": words.megabytes,
        "p_value": words.p_value,
        "signed": words.signed,
    }
    return environment


def _correlations(analysis: Analysis) -> list[dict[str, Any]]:
    """Return accuracy against dispersion, one row per workload and scale, a cell per statistic."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    chosen = analysis.observations.filter(pl.col("observation") == "dispersion")
    chosen = chosen.sort(["workload", "workers"], nulls_last=False, maintain_order=True)
    for row in chosen.iter_rows(named=True):
        key = (row["workload"], row["workers"], row["phase"])
        kept = rows.setdefault(key, {**row, "cells": {}})
        kept["cells"][row["measure"]] = row
    return list(rows.values())


def _effects(analysis: Analysis) -> list[dict[str, Any]]:
    """Return the effect sizes, without those of dispersion at a single scale."""
    alone = pl.col("observation") != "dispersion"
    chosen = analysis.observations.filter(alone | pl.col("workers").is_null())
    return [row for row in chosen.iter_rows(named=True) if row["rho"] is not None]


def _target_costs(analysis: Analysis) -> list[str]:
    """Return the costs that any method has a value for."""
    found = analysis.targets
    return [
        cost
        for cost in COSTS
        if found.select(pl.col(cost, f"more_than_{cost}").is_not_null().any()).row(0)
        != (False,) * 2
    ]


def _mean_ranks(analysis: Analysis) -> list[dict[str, Any]]:
    """Return the Gini ranks of methods early in training, one row per scale and tensor."""
    early = analysis.graph_ranks.filter(pl.col("phase") == "early", pl.col("measure") == "gini")
    rows: list[dict[str, Any]] = []
    keys = ["workload", "workers", "tensor"]
    for key, group in early.group_by(keys, maintain_order=True):
        named: dict[str, Any] = dict(zip(keys, key, strict=True))
        order = group.sort("rank", maintain_order=True)
        rows.append(named | {"order": list(order.select("method", "rank", "value").iter_rows())})
    return rows


def _trial_facts(results: Results) -> str:
    """Return the seeds and the validation share of the trials, as text."""
    trials = results.analysis.trials
    if trials.is_empty():
        return ""
    shares = {results.specs[run_id]["validation_share"] for run_id in trials["run_id"]}
    text = f"Trials use {_seeds(trials)} and are evaluated on "
    text += f"{words.listed([f'{100 * s:g} %' for s in sorted(shares)])} of the training samples."
    final = results.analysis.runs
    return text if final.is_empty() else f"{text} The runs that are compared use {_seeds(final)}."


def _seeds(runs: pl.DataFrame) -> str:
    seeds = sorted(set(runs["seed"].to_list()))
    return f"the seed{'s'[len(seeds) == 1 :]} {words.listed([str(seed) for seed in seeds])}"


def _graphs(results: Results) -> list[dict[str, Any]]:
    """Return a drawing for each graph: of its first step, and of the last where it has changed."""
    tiles: dict[tuple[int, str], dict[str, Any]] = {}
    look = method_styles(results.analysis.all_runs)
    for row in results.analysis.runs.iter_rows(named=True):
        key = (row["workers"], row["method"])
        needless = row["centralized"] or row["twin"]
        if key in tiles or needless or len(tiles) == _MOST_GRAPHS:
            continue
        try:
            schedule = schedule_of(results.specs[row["run_id"]])
        except UserError:  # the topology no longer exists
            continue
        if schedule:
            last = row["planned_steps"] - 1
            tiles[key] = {
                "workload": row["workload"],
                "workers": row["workers"],
                "method": row["method"],
                "topology": row["topology"],
                "drawings": _drawings(schedule, look[row["method"]].color, last),
            }
    return list(tiles.values())


def _drawings(schedule: Schedule, color: str, last: int) -> list[tuple[str, Markup]]:
    first, end = schedule.round(0), schedule.round(last)
    drawn = [(_how_often(schedule), thumbnail(schedule, color))]
    if schedule.period is None and end.degree != first.degree:
        drawn = [
            (f"first, {first.degree} neighbours", drawn[0][1]),
            (f"last, {end.degree} neighbours", thumbnail(schedule, color, last)),
        ]
    return [(caption, Markup(svg)) for caption, svg in drawn]


def _how_often(schedule: Schedule) -> str:
    """Return how many steps of a cycle exchange anything; empty if all do."""
    period = schedule.period or 1
    if period == 1 or period > LONGEST_PERIOD:
        return ""
    heard = sum(schedule.round(step).degree > 0 for step in range(period))
    return "" if heard == period else f"{heard} of {period} steps"
