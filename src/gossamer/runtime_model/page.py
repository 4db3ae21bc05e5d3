"""A plan as a page that opens offline: advice, tables, a timeline, and speed-up curves."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gossamer.files import write_atomic
from gossamer.picture import INK, PALETTE, subplots
from gossamer.runtime_model.methods import DDP, METHODS, Job, build
from gossamer.runtime_model.model import Event, Task, predict, timeline
from gossamer.runtime_model.plan import Advice, Plan
from gossamer.runtime_model.profile import Profile
from gossamer.runtime_model.words import columns_of, describe, legend

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_TASKS: dict[Task, tuple[str, str]] = {
    "F": ("F forward", "#56B4E9"),
    "B": ("B backward", "#0072B2"),
    "U": ("U update", "#E69F00"),
    "C": ("C communication", "#D55E00"),
}
_WORKERS_SHOWN = 4
_ITERATIONS_SHOWN = 3
_RATES = np.geomspace(1 / 32, 8, 13)
_VARIANCES = (0.0, 0.0017, 0.005, 0.0134, 0.03, 0.06)
_TRIALS = 8
_HERE = {"dash": "dot", "color": INK, "width": 2}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1120px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; margin: .5em 0; }
th, td { padding: .25em .9em; text-align: right; border-bottom: 1px solid #e4e7eb; }
th:first-child, td:first-child { text-align: left; }
tr.advised { background: #e3f4ee; font-weight: 600; }
.advice { background: #f5f7fa; border-left: 4px solid #009E73; padding: .6em 1em; margin: .6em 0; }
.stay { border-color: #D55E00; }
.note { color: #616e7c; font-size: .9em; }
"""


def write_page(plan: Plan, path: Path) -> None:
    """Write a plan as one .html file with everything in it."""
    figures = [
        (
            "Timeline",
            "The first iterations of some workers, computing above and communicating below.",
            _timelines(plan),
        ),
        ("Where the saving comes from", _SPLIT_NOTE, _splits(plan.advice)),
        ("Speed-up over the variance of compute time", _note(plan), _sweep_variances(plan)),
    ]
    between = plan.profile.network.between
    if between is not None:
        rates = _sweep_rates(plan, between.bits_s / 1e9)
        figures.append(("Speed-up over the rate between nodes", _note(plan), rates))
    parts = [_heading(plan), *(_scale(plan, advice) for advice in plan.advice)]
    parts.append(f'<p class="note">{html.escape(legend(plan.rows))}</p>')
    for index, (title, note, figure) in enumerate(figures):
        drawn = figure.to_html(full_html=False, include_plotlyjs=index == 0)
        parts.append(f'<h2>{title}</h2><p class="note">{html.escape(note)}</p>{drawn}')
    title = html.escape(f"Plan: {plan.profile.name}")
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
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


def _heading(plan: Plan) -> str:
    where = ", ".join(f"{key} {value}" for key, value in plan.profile.environment.items())
    note = f'<p class="note">Profile: {html.escape(where)}</p>' if where else ""
    return f"<h1>Does decentralization pay?</h1><p>{html.escape(describe(plan.profile))}</p>{note}"


def _scale(plan: Plan, advice: Advice) -> str:
    stay = " stay" if advice.method == DDP else ""
    here = [row for row in plan.rows if row.workers == advice.workers]
    columns = columns_of(here)
    heads = "".join(f"<th>{html.escape(heading)}</th>" for heading in columns)
    rows = "".join(
        f"<tr{' class=advised' if row.method == advice.method else ''}>"
        + "".join(f"<td>{html.escape(cell(row))}</td>" for cell in columns.values())
        + "</tr>"
        for row in here
    )
    return (
        f'<h2>{advice.workers} workers</h2><div class="advice{stay}">{html.escape(advice.reason)}'
        f"</div><table><tr>{heads}</tr>{rows}</table>"
    )


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
            marker={"color": color, "line": {"color": "white", "width": 0.6 * (task in "BC")}},
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
    for color, (name, shares) in zip(PALETTE, parts.items(), strict=False):
        figure.add_bar(
            x=[f"{each.workers} workers" for each in advice],
            y=[100 * share for share in shares],
            name=name,
            marker_color=color,
            hovertemplate="%{y:.1f} points",
        )
    figure.update_layout(barmode="relative")
    figure.update_yaxes(title_text="points saved")
    return _finish(figure, 340)


def _sweep_rates(plan: Plan, gbit: float) -> Figure:
    figure = _sweep(plan, _RATES.tolist(), Profile.with_rate, gbit)
    figure.update_xaxes(type="log", title_text="Gbit/s between nodes")
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
    for color, name in zip(itertools.cycle(PALETTE), names, strict=False):
        figure.add_scatter(
            x=[value * unit for value in values],
            y=ddp / np.asarray(seconds(name)),
            mode="lines+markers",
            name=name,
            line={"color": color, "width": 2},
            marker={"size": 5},
            hovertemplate="%{y:.2f}",
        )
    figure.add_hline(y=1, line={"color": INK, "width": 1})
    figure.update_yaxes(title_text="DDP's time / this one's")
    return _finish(figure, 420)


def _finish(figure: Figure, height: int) -> Figure:
    figure.update_layout(
        template="simple_white",
        font={"family": "system-ui, sans-serif", "color": INK, "size": 12},
        width=1080,
        height=height,
        margin={"l": 90, "r": 20, "t": 40, "b": 50},
        hovermode="closest",
    )
    return figure
