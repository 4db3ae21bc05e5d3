"""The runtime model against arXiv:2410.11998: its simulation, and its published times.

python -m benchmarks.runtime_model.paper simulation --figure simulation.html
python -m benchmarks.runtime_model.paper table
python -m benchmarks.runtime_model.paper host
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq
from torch import nn

from gossamer.runtime_model.costs import everyone
from gossamer.runtime_model.methods import DDP, Job, build, gossip, schedule_of
from gossamer.runtime_model.model import (
    Compute,
    ExchangeTime,
    Order,
    TimedMethod,
    Trials,
    bucket_wise,
    gamma,
    in_backward,
    predict,
    whole_step,
)
from gossamer.runtime_model.presets import from_data_sheet
from gossamer.runtime_model.profile import Profile

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

WORKERS, BUCKETS, THETA = 8, 4, 0.2
VARIANCES = (0.0, 0.0017, 0.0134)
FORWARD, BACKWARD = 1.0, 0.5
"""In units of a forward pass; a backward pass is two, half of one per bucket."""

ORDERS: dict[str, Order] = {
    "all-reduce": in_backward,
    "decentralized, bucket by bucket": bucket_wise,
    "decentralized, whole step": whole_step,
}

VARIANCE = 0.0134
"""Of the transformer, as the paper measured it."""

HOST_MS = 33.0
"""The time of one core to issue the operations of a step; see `host`."""


class Cluster(NamedTuple):
    """One of the paper's clusters and its milliseconds per iteration."""

    gpu: str
    workers_per_node: int
    link: str
    measured: dict[int, tuple[float, float, float]]
    """Workers -> all-reduce, one-peer exponential, AER."""


CLUSTERS = (
    Cluster(
        "t4",
        8,
        "100gbit",
        {16: (372.5, 314.8, 312.3), 32: (225.5, 178.8, 178.8), 64: (167.3, 123.1, 122.2)},
    ),
    Cluster(
        "a100",
        4,
        "100gbit",
        {8: (73.0, 63.4, 61.7), 16: (54.8, 46.8, 45.8), 32: (51.5, 44.7, 43.7)},
    ),
    Cluster(
        "a40",
        4,
        "25gbit",
        {8: (166.1, 122.8, 122.0), 16: (195.5, 97.4, 78.9), 32: (188.5, 110.8, 67.9)},
    ),
)


@app.command()
def simulation(
    figure: Annotated[Path | None, typer.Option(help="Write .html, .png or .svg.")] = None,
    trials: Annotated[int, typer.Option(help="Monte-Carlo trials.")] = 200,
) -> None:
    """Iteration time over the cost of communication, for three variances of compute time.

    8 workers, 4 buckets, an update of 0.2 per bucket, complete topology. One JSON line per point.
    """
    exchange_s = np.linspace(0.0, 1.5, 16)
    points = {
        (variance, name): [_simulate(order, c, variance, trials) for c in exchange_s.tolist()]
        for variance in VARIANCES
        for name, order in ORDERS.items()
    }
    for (variance, name), times in points.items():
        for c, seconds in zip(exchange_s.tolist(), times, strict=True):
            print(json.dumps({"variance": variance, "method": name, "c": c, "time": seconds}))
    if figure is not None:
        _draw(exchange_s, points, figure)


def _simulate(order: Order, c: float, variance: float, trials: int) -> float:
    compute = Compute(
        forward_s=FORWARD, backward_s=(BACKWARD,) * BUCKETS, update_s=(THETA,) * BUCKETS
    )
    exchange = ExchangeTime(everyone, np.full((WORKERS, BUCKETS), c))
    method = TimedMethod(order, compute, WORKERS, lambda step: exchange)
    return predict(method, Trials(draw=gamma(variance), num_trials=trials)).mean_s


def _draw(exchange_s: np.ndarray, points: dict[tuple[float, str], list[float]], path: Path) -> None:
    from gossamer.charts import page
    from gossamer.charts.theme import PALETTE

    figure = page.subplots(
        rows=2,
        cols=len(VARIANCES),
        shared_xaxes=True,
        shared_yaxes=True,
        vertical_spacing=0.07,
        horizontal_spacing=0.03,
        subplot_titles=[f"variance {variance:g}" for variance in VARIANCES],
    )
    computing = FORWARD + BUCKETS * (BACKWARD + THETA)
    share = BUCKETS * exchange_s / computing
    for column, variance in enumerate(VARIANCES, start=1):
        reduced = np.asarray(points[variance, "all-reduce"])
        for color, name in zip(PALETTE[1:], ORDERS, strict=False):
            times = np.asarray(points[variance, name])
            line = {"color": color, "width": 2}
            first = {"showlegend": column == 1, "legendgroup": name, "name": name}
            figure.add_scatter(x=share, y=times / computing, line=line, row=1, col=column, **first)
            figure.add_scatter(
                x=share, y=100 * (1 - times / reduced), line=line, showlegend=False,
                row=2, col=column,
            )  # fmt: skip
        figure.update_xaxes(title_text="wire time / compute", row=2, col=column)
    figure.update_yaxes(title_text="iteration time / compute", row=1, col=1)
    figure.update_yaxes(title_text="saving over all-reduce, %", row=2, col=1)
    figure.update_layout(
        title="8 workers, 4 buckets, θ = 0.2, complete topology",
        width=1100,
        height=640,
        legend={"orientation": "h", "y": -0.14},
        margin={"t": 90, "b": 90},
    )
    page.save(figure, path)


@app.command()
def table(
    least_ms: Annotated[
        list[float], typer.Option(help="Lower bound of the compute time; repeatable.")
    ] = [0.0, HOST_MS],  # noqa: B006
) -> None:
    """Predict the published times: one efficiency per cluster, fitted at its smallest scale.

    Compute is inversely proportional to the workers, because the paper's batch is fixed, with a
    lower bound: by default none, then the time that a host needs to issue a step.
    """
    for least in least_ms:
        rows = [row for cluster in CLUSTERS for row in _predict_cluster(cluster, least / 1e3)]
        _print_table(rows, f"compute at least {least:.0f} ms")


class Row(NamedTuple):
    """One published point and its prediction, in milliseconds."""

    cluster: str
    workers: int
    fitted: bool
    compute: float
    measured: tuple[float, float, float]
    predicted: tuple[float, float, float]

    @property
    def savings(self) -> tuple[float, float]:
        """Of AER over all-reduce in percent: measured, predicted."""
        return tuple(100 * (1 - t[2] / t[0]) for t in (self.measured, self.predicted))  # pyright: ignore[reportReturnType]


def _predict_cluster(cluster: Cluster, least_s: float) -> list[Row]:
    smallest = min(cluster.measured)

    def compute_s(workers: int, at_smallest_s: float) -> float:
        return max(least_s, at_smallest_s * smallest / workers)

    def off(at_smallest_s: float) -> float:
        job = Job.of(_profile(cluster, compute_s(smallest, at_smallest_s)), smallest)
        return predict(build(DDP, job), job.trials()).mean_s - cluster.measured[smallest][0] / 1e3

    fitted_s = float(brentq(off, 0.005, 1.0, xtol=1e-5))  # pyright: ignore[reportArgumentType]
    rows: list[Row] = []
    for workers, measured in cluster.measured.items():
        seconds = compute_s(workers, fitted_s)
        job = Job.of(_profile(cluster, seconds), workers)
        methods = [
            build(DDP, job),
            *(
                gossip(job, schedule=schedule_of(name, job), order=bucket_wise)
                for name in ("one_peer_hypercube", "aer")
            ),
        ]
        ddp, one_peer, aer = (1e3 * predict(each, job.trials()).mean_s for each in methods)
        rows.append(
            Row(
                cluster.gpu,
                workers,
                workers == smallest,
                1e3 * seconds,
                measured,
                (ddp, one_peer, aer),
            )
        )
    return rows


def _profile(cluster: Cluster, compute_s: float) -> Profile:
    """Return the paper's transformer with forward and backward pass of this length."""
    sheet = from_data_sheet(
        cluster.gpu,
        cluster.link,
        parameters=65e6,
        flops=1e12,
        workers=min(cluster.measured),
        workers_per_node=cluster.workers_per_node,
        variance=VARIANCE,
    )
    given_s = sheet.forward_s + sum(bucket.backward_s for bucket in sheet.buckets)
    return sheet.with_compute(compute_s / given_s)


def _print_table(rows: list[Row], title: str) -> None:
    table = Table("cluster", "workers", "compute", title=title)
    for heading in ("all-reduce", "one-peer exp", "AER", "saving", "off"):
        table.add_column(f"{heading}\nmeas. / pred." if heading != "off" else "points\noff")
    for row in rows:
        pairs = zip((*row.measured, row.savings[0]), (*row.predicted, row.savings[1]), strict=True)
        cells = [f"{measured:.1f} / {predicted:.1f}" for measured, predicted in pairs]
        off = row.savings[1] - row.savings[0]
        mark = "fitted" if row.fitted else f"{off:+.1f}"
        table.add_row(row.cluster, str(row.workers), f"{row.compute:.0f}", *cells, mark)
    tested = [row for row in rows if not row.fitted]
    within = sum(abs(row.savings[1] - row.savings[0]) <= 8 for row in tested)
    console = Console(width=120)
    console.print(table)
    console.print(f"within 8 percentage points: {within} of {len(tested)}")


@app.command()
def host(steps: int = 20) -> None:
    """Measure the time of one core to issue a step of a 6 + 6 layer transformer, in milliseconds.

    Widths are tiny, so that compute is negligible; forward, backward, clipping and Adam.
    """
    torch.set_num_threads(1)
    width, tokens = 16, torch.randint(32, (2, 3))
    body = nn.Transformer(width, 8, 6, 6, dim_feedforward=32, batch_first=True)
    model = nn.ModuleList([body, nn.Embedding(32, width), nn.Linear(width, 32)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    mask = nn.Transformer.generate_square_subsequent_mask(3)

    def step() -> None:
        optimizer.zero_grad()
        embedded = model[1](tokens)
        outputs = model[2](body(embedded, embedded, tgt_mask=mask))
        nn.functional.cross_entropy(outputs.flatten(0, 1), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(5):
        step()
    began = time.process_time()
    for _ in range(steps):
        step()
    print(json.dumps({"host_ms": 1e3 * (time.process_time() - began) / steps}))


if __name__ == "__main__":
    app()
