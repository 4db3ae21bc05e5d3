"""Pictures of topologies: the graph and the matrix of each round, and the decay of consensus error.

Figures are plotly's; ``charts.page.save`` writes them. The circular layout is computed here: those
of networkx would need a conversion of the arrays to its graphs and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.charts.page import subplots
from gossamer.charts.theme import PALETTE, REFERENCE
from gossamer.errors import UserError
from gossamer.topology import Round, Schedule
from gossamer.topology.arrays import FloatArray, IntArray
from gossamer.topology.spectrum import consensus_decay

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_WORKERS = 4096
"""The most workers of a picture, whose matrix is dense before it is reduced."""

MAX_ROUNDS = 32
_MAX_EDGES_DRAWN = 3000
_MAX_EDGES_IN_THUMBNAIL = 400
_MAX_MATRIX_SIDE = 200
_GALLERY_COLUMNS = 6
_POINTS_PER_CURVE = 9

_DASHES = ("solid", "dash", "dot", "longdash")
_THUMBNAIL_DASHES = ("none", "7 4", "2 3", "8 3 2 3")
_WORKER = "#52606d"
"""Readable under white labels, and visible on white and on black."""


def check_drawable(num_workers: int, num_rounds: int = 1) -> None:
    """Raise if a picture would need gigabytes of memory."""
    if num_workers > MAX_WORKERS or num_rounds > MAX_ROUNDS:
        raise UserError(
            f"a picture can have up to {MAX_WORKERS:,} workers and {MAX_ROUNDS} rounds, got "
            f"{num_workers:,} workers and {num_rounds}; draw a smaller one, which looks similar"
        )


def draw(schedule: Schedule, num_rounds: int = 4) -> Figure:
    """Return a figure of the first rounds: the graph of each with its matrix."""
    check_drawable(schedule.num_workers, num_rounds)
    shown = first_rounds(schedule, num_rounds)
    rounds = [round for _, round in shown]
    alone = len(rounds) == 1  # graph and matrix side by side, else one above the other
    rows, columns = (1, 2) if alone else (2, len(rounds))
    figure = subplots(
        rows=rows,
        cols=columns,
        subplot_titles=None if alone else [f"round {step}" for step, _ in shown],
        vertical_spacing=0.06,
        horizontal_spacing=0.1 / columns,
    )
    for index, round in enumerate(rounds, start=1):
        _add_graph(figure, [round], row=1, column=index)
        _add_matrix(figure, round, row=rows, column=columns if alone else index)
    figure.update_yaxes(title_text="receiver", row=rows, col=2 if alone else 1)
    figure.update_coloraxes(
        cmin=0,
        cmax=max(float(round.matrix().max()) for round in rounds),
        colorbar={
            "title": {"text": "weight", "side": "right"},
            "len": 0.4,
            "y": 0.2,
            "thickness": 12,
        },
    )
    side = 480 if alone else 330
    return _finish(
        figure,
        title=f"{schedule.name} on {schedule.num_workers} workers",
        width=side * columns + 120,
        height=side * rows + 110,
    )


def gallery(schedules: Sequence[Schedule], steps: int = 16) -> Figure:
    """Return a figure that compares schedules: consensus error by round and by cost, then graphs.

    All schedules must be on the same number of workers.
    """
    check_drawable(schedules[0].num_workers)
    columns = _GALLERY_COLUMNS
    graph_rows = math.ceil(len(schedules) / columns)
    left, right = columns // 2, columns - columns // 2
    race: list[dict[str, Any] | None] = [{"colspan": left}, *[None] * (left - 1)]
    race += [{"colspan": right}, *[None] * (right - 1)]
    figure = subplots(
        rows=1 + graph_rows,
        cols=columns,
        specs=[race, *[[{}] * columns for _ in range(graph_rows)]],
        row_heights=[2.0] + [1.0] * graph_rows,
        subplot_titles=[
            "consensus error left after t rounds",
            "the same, by model copies that the busiest worker has sent",
            *[_short_title(schedule) for schedule in schedules],
        ],
        vertical_spacing=0.09,
        horizontal_spacing=0.03,
    )
    for index, schedule in enumerate(schedules):
        _add_race(figure, schedule, steps, index, second_column=left + 1)
        row, column = divmod(index, columns)
        rounds = [round for _, round in first_rounds(schedule, 4)]
        _add_graph(figure, rounds, row=2 + row, column=1 + column, labels=False)
    for column in (1, left + 1):
        figure.update_yaxes(
            type="log", range=[-4.2, 0.1], exponentformat="power", dtick=1, row=1, col=column
        )
    figure.update_xaxes(title_text="rounds", row=1, col=1)
    figure.update_xaxes(title_text="copies sent", row=1, col=left + 1, range=[0, steps])
    return _finish(
        figure,
        title=f"The catalogue on {schedules[0].num_workers} workers; rounds of a cycle in colours",
        width=1280,
        height=520 + 250 * graph_rows,
        legend=True,
    )


def thumbnail(schedule: Schedule, color: str, step: int = 0) -> str:
    """Return the graph of a step as a small SVG for a page.

    Workers have the colour of the surrounding text. For a periodic schedule the first rounds are
    drawn, at most four, each with another dash.

    Args:
        schedule: the rounds.
        color: of the edges.
        step: the round to draw if the schedule is not periodic.
    """
    rounds = [schedule.round(step)]
    if schedule.period is not None:
        rounds = [round for _, round in first_rounds(schedule, len(_THUMBNAIL_DASHES))]
    points = 100 * _circle(schedule.num_workers)
    paths: list[str] = []
    for round, dash in zip(rounds, _THUMBNAIL_DASHES, strict=False):
        receivers, senders, _ = _edges_to_draw(round, _MAX_EDGES_IN_THUMBNAIL // len(rounds))
        starts, ends = points[senders], points[receivers]
        curves = np.hstack([starts, _bends(starts, ends, radius=100), ends]).round().astype(int)
        path = "".join(f"M{a} {b}Q{c} {d} {e} {f}" for a, b, c, d, e, f in curves.tolist())
        opacity = np.clip(8 / math.sqrt(len(senders) + 1), 0.3, 0.9)
        look = f'stroke="{color}" stroke-opacity="{opacity:.2f}" stroke-dasharray="{dash}"'
        paths.append(f'<path d="{path}" fill="none" stroke-width="1.5" {look}/>')
    size = float(np.clip(300 / schedule.num_workers, 2.4, 12))
    dots = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in points)
    look = f'stroke="currentColor" stroke-width="{size:.1f}" stroke-linecap="round"'
    paths.append(f'<path d="{dots}" fill="none" {look}/>')
    head = '<svg viewBox="-110 -110 220 220" class="graph" aria-hidden="true">'
    return f"{head}{''.join(paths)}</svg>"


def _finish(figure: Figure, *, title: str, width: int, height: int, legend: bool = False) -> Figure:
    figure.update_layout(
        title_text=title,
        width=width,
        height=height,
        margin={"l": 50, "r": 30, "t": 90, "b": 40},
        showlegend=legend,
        legend={"font": {"size": 11}},
    )
    return figure


def first_rounds(schedule: Schedule, limit: int) -> list[tuple[int, Round]]:
    """Return the steps and rounds to show: at most one cycle, without equal successive rounds.

    Steps without an exchange, such as most of local SGD's, are skipped if others have one.
    """
    shown: list[tuple[int, Round]] = []
    seen = 0
    for step in range(schedule.period or limit):
        round = schedule.round(step)
        if round.degree == 0:
            continue
        if not shown or round != shown[-1][1]:
            shown.append((step, round))
        seen += 1
        if seen == limit:
            break
    return shown or [(0, schedule.round(0))]


def _short_title(schedule: Schedule) -> str:
    name, _, arguments = schedule.name.partition("(")
    return f"<b>{name}</b><br>{'<br>'.join(wrap(arguments.rstrip(')'), 24))}"


def _add_graph(
    figure: Figure, rounds: Sequence[Round], *, row: int, column: int, labels: bool = True
) -> None:
    """Draw workers on a circle and the edges of each round in its own colour."""
    num_workers = rounds[0].num_workers
    points = _circle(num_workers)
    at: dict[str, Any] = {"row": row, "col": column}
    for round, color in zip(rounds, PALETTE, strict=False):
        _add_edges(figure, round, points, color, at)
    named = labels and num_workers <= 40
    figure.add_scatter(
        x=points[:, 0],
        y=points[:, 1],
        mode="markers+text" if named else "markers",
        text=[str(worker) for worker in range(num_workers)],
        textfont={"size": 9, "color": "white"},
        marker={"size": 19 if named else float(np.clip(160 / num_workers, 2, 9)), "color": _WORKER},
        hovertext=_hover_texts(rounds[0]) if num_workers <= 200 else None,
        hoverinfo="text",
        showlegend=False,
        **at,
    )
    figure.update_xaxes(visible=False, range=[-1.25, 1.25], **at)
    anchor = _axis_name(figure, row, column)
    figure.update_yaxes(visible=False, range=[-1.25, 1.25], scaleanchor=anchor, **at)


def _add_edges(
    figure: Figure, round: Round, points: FloatArray, color: str, at: dict[str, Any]
) -> None:
    receivers, senders, share = _edges_to_draw(round, _MAX_EDGES_DRAWN)
    curves = _curves(points[senders], points[receivers])
    figure.add_scatter(
        x=curves[..., 0].ravel(),
        y=curves[..., 1].ravel(),
        mode="lines",
        line={"width": 1.6 if len(senders) < 200 else 0.8, "color": color},
        opacity=float(np.clip(6 / math.sqrt(len(senders) + 1), 0.12, 0.8)),
        hoverinfo="skip",
        showlegend=False,
        **at,
    )
    if not round.symmetric:
        _add_arrowheads(figure, curves, color, at)
    if share < 1:
        note = {"font": {"size": 10, "color": REFERENCE}, "showarrow": False}
        figure.add_annotation(text=f"{share:.1%} of the edges drawn", x=0, y=-1.18, **note, **at)


def _circle(num_workers: int) -> FloatArray:
    angles = np.pi / 2 - 2 * np.pi * np.arange(num_workers) / num_workers
    return np.column_stack([np.cos(angles), np.sin(angles)])


def _edges_to_draw(round: Round, most: int) -> tuple[IntArray, IntArray, float]:
    """Return receivers and senders, each link once where it goes both ways, and the share drawn."""
    matrix = round.matrix().tocoo()
    receivers, senders = (index.astype(np.int64) for index in matrix.coords)
    keep = receivers < senders if round.symmetric else receivers != senders
    receivers, senders = receivers[keep], senders[keep]
    chosen = slice(None, None, math.ceil(len(receivers) / most) or 1)
    share = len(receivers[chosen]) / len(receivers) if len(receivers) else 1.0
    return receivers[chosen], senders[chosen], share


def _curves(starts: FloatArray, ends: FloatArray) -> FloatArray:
    """Return [edges, points + 1, 2]: curves bent towards the centre, long ones more; then a gap."""
    t = np.linspace(0, 1, _POINTS_PER_CURVE)[None, :, None]
    bend = _bends(starts, ends)[:, None, :]
    curves = (1 - t) ** 2 * starts[:, None] + 2 * t * (1 - t) * bend + t**2 * ends[:, None]
    gap = np.full((len(starts), 1, 2), np.nan)
    return np.concatenate([curves, gap], axis=1)


def _bends(starts: FloatArray, ends: FloatArray, radius: float = 1) -> FloatArray:
    """Return the control points of the curves, [edges, 2]."""
    chord = np.linalg.norm(starts - ends, axis=1)[:, None]
    return (1 - chord / (4 * radius)) * (starts + ends) / 2


def _add_arrowheads(figure: Figure, curves: FloatArray, color: str, at: dict[str, Any]) -> None:
    """Mark the direction of each curve at two thirds of its way."""
    tip = 2 * curves.shape[1] // 3
    tips, tails = curves[:, tip], curves[:, tip - 1]
    dx, dy = (tips - tails).T
    figure.add_scatter(
        x=tips[:, 0],
        y=tips[:, 1],
        mode="markers",
        marker={
            "symbol": "triangle-up",
            "size": 7,
            "color": color,
            "angle": np.degrees(np.arctan2(dx, dy)),
        },
        hoverinfo="skip",
        showlegend=False,
        **at,
    )


def _hover_texts(round: Round) -> list[str]:
    def text(worker: int) -> str:
        part = round.neighbours(worker)
        heard = ", ".join(f"{w} ({weight:.3g})" for w, weight in zip(*part.receives, strict=True))
        return f"worker {worker} keeps {part.self_weight:.3g}<br>receives from {heard or 'nobody'}"

    return [text(worker) for worker in range(round.num_workers)]


def _add_matrix(figure: Figure, round: Round, *, row: int, column: int) -> None:
    """Draw W as a heat map: row i has the weights of worker i for each sender."""
    dense, block = _shrink(round.matrix().toarray())
    gap = 1 if len(dense) <= 40 else 0
    figure.add_heatmap(
        z=np.where(dense > 0, dense, np.nan).astype(np.float32),
        x0=(block - 1) / 2,
        y0=(block - 1) / 2,
        dx=block,
        dy=block,
        coloraxis="coloraxis",
        hovertemplate="worker %{y} gives %{z:.3g} to %{x}<extra></extra>",
        xgap=gap,
        ygap=gap,
        row=row,
        col=column,
    )
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(showgrid=False, showline=True, mirror=True, constrain="domain", row=row, col=column)
    anchor = _axis_name(figure, row, column)
    figure.update_yaxes(autorange="reversed", scaleanchor=anchor, row=row, col=column)
    figure.update_xaxes(title_text="sender", row=row, col=column)


def _shrink(matrix: FloatArray) -> tuple[FloatArray, int]:
    """Return block maxima of the matrix, with at most 200 rows, and the side of a block."""
    block = math.ceil(len(matrix) / _MAX_MATRIX_SIDE)
    side = math.ceil(len(matrix) / block)
    padded = np.zeros((side * block, side * block))
    padded[: len(matrix), : len(matrix)] = matrix
    return padded.reshape(side, block, side, block).max(axis=(1, 3)), block


def _add_race(
    figure: Figure, schedule: Schedule, steps: int, index: int, second_column: int
) -> None:
    """Draw the decay of the consensus error by rounds, and by copies sent."""
    errors = np.concatenate([[1.0], consensus_decay(schedule, steps)])
    by_worker = [schedule.round(step).copies_sent for step in range(steps)]
    sent = np.concatenate([[0.0], np.cumsum(by_worker, axis=0).max(axis=1)])
    # A logarithmic axis has no zero: an exact average is drawn below its lower edge.
    shown = np.maximum(errors, 1e-9)
    line = {
        "color": PALETTE[index % len(PALETTE)],
        "dash": _DASHES[index // len(PALETTE) % len(_DASHES)],
        "width": 2,
    }
    for column, xs in ((1, np.arange(steps + 1)), (second_column, sent)):
        figure.add_scatter(
            x=xs,
            y=shown,
            mode="lines",
            name=schedule.name.split("(")[0],
            legendgroup=schedule.name,
            showlegend=column == 1,
            line=line,
            hovertemplate="%{x:.3g}: %{y:.3g}",
            row=1,
            col=column,
        )


def _axis_name(figure: Figure, row: int, column: int) -> str:
    subplot: Any = figure.get_subplot(row, column)
    return subplot.xaxis.plotly_name.replace("axis", "")
