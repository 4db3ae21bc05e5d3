"""Figures of the cost to reach a target: at each scale, and over all settings."""

from __future__ import annotations

import polars as pl

from gossamer.bench.analysis import Analysis
from gossamer.bench.analysis.targets import COSTS, FARTHEST
from gossamer.bench.report.figure import Figure
from gossamer.bench.report.style import Style
from gossamer.bench.report.traces import Trace, line, mark, points

_UNITS = {"bytes_sent": 1e6}
_LABELS = {name: cost.label for name, cost in COSTS.items()} | {"bytes_sent": "MB sent per worker"}
_FIRST = ("modelled_s", "bytes_sent", "step", "train_s")
"""Costs in the order of the menu."""


def target_figure(analysis: Analysis, look: dict[str, Style]) -> Figure:
    """Return what the median seed spends to the target, against scale, a line per method."""
    traces: list[Trace] = []
    found = analysis.targets
    for (workload, method), group in found.group_by(["workload", "method"], maintain_order=True):
        rows = group.sort("workers")
        for cost in _FIRST:
            meta = mark(str(workload), None, str(method), "workers", _LABELS[cost], show=cost)
            unit = _UNITS.get(cost, 1)
            solved = rows.filter(pl.col(cost).is_not_null())
            hover = f"%{{x}} workers: %{{y:.4~g}} {_LABELS[cost]}"
            if len(solved):
                style = look[str(method)]
                own = meta | {"scales": solved["workers"].to_list()}
                at = solved[cost] / unit
                traces.append(line(style, solved["workers"], at, own, hover, markers=20))
            open_ended = rows.filter(pl.col(f"more_than_{cost}").is_not_null())
            if len(open_ended):
                own = meta | {"scales": open_ended["workers"].to_list()}
                at = open_ended[f"more_than_{cost}"] / unit
                hover = f"%{{x}} workers: not reached, more than %{{y:.4~g}} {_LABELS[cost]}"
                trace = points(look[str(method)], open_ended["workers"], at, own, hover)
                trace["marker"] |= {"symbol": "arrow-up-open", "line": {"width": 1.5}}
                traces.append(trace | {"showlegend": not len(solved)})
    scales = sorted(set(found["workers"].to_list()))
    ticks = {"tickvals": scales, "ticktext": [str(scale) for scale in scales]}
    return Figure(
        "target",
        "Cost to the target",
        "What the median seed has spent at its first evaluation that is as good as the target; "
        "lower is better. An open arrow: half of the seeds or more end without reaching it, and "
        "the arrow is at the least that such a run spent, a lower bound.",
        traces,
        {"xaxis": {"type": "log", **ticks}, "yaxis": {"type": "log"}},
        faceted=False,
        choices=_offered(traces),
    )


def profile_figure(analysis: Analysis, look: dict[str, Style]) -> Figure:
    """Return performance profiles: the share of settings solved within a ratio of the best."""
    traces: list[Trace] = []
    found = analysis.profiles
    settings = dict(analysis.scores.select("cost", "settings").unique("cost").iter_rows())
    for cost in _FIRST:
        rows = found.filter(pl.col("cost") == cost)
        if settings.get(cost, 0) < 2:
            continue
        end = max(FARTHEST, float(str(rows["ratio"].max()))) * 1.05
        for (method,), curve in rows.group_by(["method"], maintain_order=True):
            meta = mark(
                None,
                None,
                str(method),
                f"{_LABELS[cost]} / least of any",
                "share of settings",
                show=cost,
            )
            trace = line(
                look[str(method)],
                [*curve["ratio"], end],
                [*curve["share"], curve["share"][-1]],
                meta,
                "within %{x:.3~g} of the best: %{y:.0%} of settings",
            )
            trace["line"]["shape"] = "hv"
            traces.append(trace)
    return Figure(
        "profile",
        "Performance profiles",
        "Over all workloads and scales: the share of settings at which a method reaches the target "
        "for at most x times the cost of the best method. The left end is how often it is the "
        "best, the right end how often it reaches the target at all. Higher is better.",
        traces,
        {"xaxis": {"type": "log"}, "yaxis": {"range": [-0.03, 1.05], "tickformat": ".0%"}},
        faceted=False,
        choices=_offered(traces),
    )


def _offered(traces: list[Trace]) -> dict[str, dict[str, str]]:
    shown = {trace["meta"]["choice"]["show"] for trace in traces}
    return {"show": {cost: _LABELS[cost] for cost in _FIRST if cost in shown}}
