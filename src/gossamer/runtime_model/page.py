"""A plan as a page that opens offline: advice, tables, a timeline, and speed-up curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gossamer.charts.page import render, subplots
from gossamer.charts.theme import PALETTE
from gossamer.files import write_atomic
from gossamer.runtime_model.methods import DDP, METHODS, Job, build
from gossamer.runtime_model.model import Event, Task, predict, timeline
from gossamer.runtime_model.plan import Advice, Plan
from gossamer.runtime_model.profile import Profile
from gossamer.runtime_model.words import columns_of, describe, legend

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_TASKS: dict[Task, tuple[str, str]] = {
    "F": ("F forward", PALETTE[5]),
    "B": ("B backward", PALETTE[0]),
    "U": ("U update", PALETTE[4]),
    "C": ("C communication", PALETTE[1]),
}
_WORKERS_SHOWN = 4
_ITERATIONS_SHOWN = 3
_RATES = np.geomspace(1 / 32, 8, 13)
_VARIANCES = (0.0, 0.0017, 0.005, 0.0134, 0.03, 0.06)
_TRIALS = 8
_HERE = {"dash": "dot", "width": 2}


def write_page(plan: Plan, path: Path) -> None:
    """Write a plan as one .html file with everything in it."""
    sections = [
        (
            "timeline",
            "Timeline",
            "The first iterations of some workers, computing above and communicating below.",
            _timelines(plan),
        ),
        ("saving", "Where the saving comes from", _SPLIT_NOTE, _splits(plan.advice)),
        (
            "variance",
            "Speed-up over the variance of compute time",
            _note(plan),
            _sweep_variances(plan),
        ),
    ]
    between = plan.profile.network.between
    if between is not None:
        rates = _sweep_rates(plan, between.bits_s / 1e9)
        sections.append(("rate", "Speed-up over the rate between nodes", _note(plan), rates))
    page = render(
        "gossamer.runtime_model",
        "plan.html",
        {name: figure for name, *_, figure in sections},
        plan=plan,
        sections=sections,
        description=describe(plan.profile),
        legend=legend(plan.rows),
        columns_of=columns_of,
        stay=DDP,
    )
    write_atomic(path, lambda aside: aside.write_text(page))


_SPLIT_NOTE = (
    "Of a step of the fastest gossip against DDP's, in percentage points: exchanges that hide "
    "behind the next iteration, fewer bytes on slow links, and waiting for fewer workers."
)


def _note(plan: Plan) -> str:
    return f"Per step, on {_largest(plan)} workers, DDP = 1; the line marks the profile."


def _largest(plan: Plan) -> int:
    return max(advice.workers for advice in plan.advice)


def _timelines(plan: Plan) -> Figure:
    """Draw DDP above the advised gossip, or the fastest where the advice is DDP."""
    advice = max(plan.advice, key=lambda each: each.workers)
    job = plan.job(advice.workers)
    chosen = advice.method
    if chosen == DDP:
        here = [row for row in plan.rows if row.workers == advice.workers]
        gossiping = [row for row in here if row.method not in METHODS]
        chosen = min(gossiping, key=lambda row: row.prediction.mean_s).method
    figure = subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.09,
        subplot_titles=[DDP, chosen],
    )
    for row, name in enumerate((DDP, chosen), start=1):
        events = timeline(build(name, job), _ITERATIONS_SHOWN, draw=job.trials().draw)
        _add_timeline(figure, events, row)
    figure.update_xaxes(title_text="ms", row=2, col=1)
    figure.update_layout(barmode="overlay", bargap=0.15)
    return _finish(figure, 560)


def _add_timeline(figure: Figure, events: Sequence[Event], row: int) -> None:
    shown = [event for event in events if event.worker < _WORKERS_SHOWN]
    lanes = [
        f"{worker} {'links' if wire else 'computes'}"
        for worker in range(min(_WORKERS_SHOWN, 1 + max(event.worker for event in shown)))
        for wire in (False, True)
    ]
    for task, (name, color) in _TASKS.items():
        own = [event for event in shown if event.task == task]
        figure.add_bar(
            orientation="h",
            y=[lanes[2 * event.worker + (task == "C")] for event in own],
            x=[1e3 * (event.end_s - event.start_s) for event in own],
            base=[1e3 * event.start_s for event in own],
            # Lines between buckets, but none where they would hide bars as thin as they are.
            marker={"color": color, "line": {"width": 0.6 * (task in "BC")}},
            customdata=[(event.iteration, event.bucket) for event in own],
            hovertemplate="iteration %{customdata[0]}, bucket %{customdata[1]}: %{x:.3g} ms",
            name=name,
            legendgroup=task,
            showlegend=row == 1,
            row=row,
            col=1,
        )
    figure.update_yaxes(
        categoryorder="array", categoryarray=lanes[::-1], title_text="worker", row=row, col=1
    )


def _splits(advice: Sequence[Advice]) -> Figure:
    figure = subplots(rows=1, cols=1)
    parts = {
        "overlap": [each.split.overlap_s / each.split.ddp_s for each in advice],
        "links": [each.split.links_s / each.split.ddp_s for each in advice],
        "tolerance": [each.split.tolerance_s / each.split.ddp_s for each in advice],
    }
    for name, shares in parts.items():
        figure.add_bar(
            x=[f"{each.workers} workers" for each in advice],
            y=[100 * share for share in shares],
            name=name,
            hovertemplate="%{y:.1f} points",
        )
    figure.update_layout(barmode="relative")
    figure.update_yaxes(title_text="points saved")
    return _finish(figure, 340)


def _sweep_rates(plan: Plan, gbit: float) -> Figure:
    figure = _sweep(plan, _RATES.tolist(), Profile.with_rate, gbit)
    figure.update_xaxes(type="log", dtick="D2", title_text="Gbit/s between nodes")
    figure.add_vline(x=gbit, line=_HERE)
    return figure


def _sweep_variances(plan: Plan) -> Figure:
    figure = _sweep(plan, _VARIANCES, Profile.with_variance)
    figure.update_xaxes(title_text="variance of the normalized compute time")
    figure.add_vline(x=plan.profile.variance, line=_HERE)
    return figure


def _sweep(
    plan: Plan,
    values: Sequence[float],
    change: Callable[[Profile, float], Profile],
    unit: float = 1.0,
) -> Figure:
    workers = _largest(plan)
    names = [row.method for row in plan.rows if row.workers == workers and row.method != DDP]
    profile = plan.job(workers).profile
    jobs = [Job.of(change(profile, value), workers) for value in values]

    def seconds(name: str) -> list[float]:
        return [predict(build(name, job), job.trials(_TRIALS)).mean_s for job in jobs]

    ddp = np.asarray(seconds(DDP))
    figure = subplots(rows=1, cols=1)
    for name in names:
        figure.add_scatter(
            x=[value * unit for value in values],
            y=ddp / np.asarray(seconds(name)),
            mode="lines+markers",
            name=name,
            hovertemplate="%{y:.2f}",
        )
    figure.add_hline(y=1, line_width=1)
    figure.update_yaxes(title_text="DDP's time / this one's")
    return _finish(figure, 420)


def _finish(figure: Figure, height: int) -> Figure:
    legend = {"orientation": "h", "y": 1.05, "yanchor": "bottom", "x": 0}
    return figure.update_layout(
        height=height, margin={"l": 46, "r": 8, "t": 60, "b": 44}, legend=legend
    )
