"""Predicted against measured iteration times in the lab: `python -m benchmarks.runtime_model`.

In every round of a setting a profile is measured first, by training without communication; then
each method is measured as in benchmarks.cluster. A setting is predicted only from the median of its
profiles. The comparison uses the mean over hosts and steps, which is what the model predicts: if
compute times vary, the slowest host of a few steps is slower than that by chance.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cluster.report import times_of_rounds
from benchmarks.cluster.run import console, environment, layout_of, measure, start
from benchmarks.cluster.worker import WARMUP, Task
from benchmarks.runtime_model.score import NOT_OVERLAPPED, Point, score, table
from benchmarks.runtime_model.worker import AER, FOLDER, PROFILE, STEPS, aer_of
from gossamer.errors import UserError
from gossamer.runtime_model import Plan, Profile, make_plan, read_profile
from gossamer.runtime_model.methods import DDP

HETEROGENEOUS = "1gbit/300mbit"
METHODS = (
    *("ddp", "gossamer(ring)", "gossamer(one_peer_exponential)"),
    *("gossamer(one_peer_exponential, atc)", "gossamer(aer)", "gossamer(complete)"),
)


def main(  # noqa: PLR0913 - one parameter per option
    hosts: Annotated[list[int], typer.Option(help="Numbers of hosts; repeatable.")] = [4, 8],  # noqa: B006
    network: Annotated[
        list[str], typer.Option(help="A rate, or INSIDE/BETWEEN for two nodes; repeatable.")
    ] = ["1gbit", "300mbit", "100mbit", HETEROGENEOUS],  # noqa: B006
    variance: Annotated[list[float], typer.Option(help="Repeatable.")] = [0.0, 0.0134],  # noqa: B006
    compute_ms: Annotated[float, typer.Option(help="Emulated compute per step.")] = 200.0,
    params: Annotated[float, typer.Option(help="Parameters of the model.")] = 2.1e6,
    steps: Annotated[int, typer.Option(help="Timed steps per method and round.")] = 12,
    rounds: Annotated[int, typer.Option(help="Rounds; each runs every method once.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Append JSON lines.")] = None,
    score_only: Annotated[
        bool, typer.Option("--score", help="Measure nothing; score the points in --json.")
    ] = False,
) -> None:
    """Measure, predict, and score the predictions."""
    if score_only:
        if json_file is None:
            raise UserError("--score reads what --json wrote, got no file; give --json FILE")
        points = _read(json_file)
    else:
        points: list[Point] = []
        _append(json_file, {"kind": "run", **environment()})
        for num_hosts in hosts:
            for each in network:
                for value in variance:
                    task = _task(compute_ms, params, steps, rounds, value)
                    some = _measure_setting(task, num_hosts, each, json_file)
                    for point in some:
                        _append(json_file, {"kind": "point", **asdict(point)})
                    points += some
    console.print(table(points))
    print(json.dumps(score(points).to_dict()))


def _task(compute_ms: float, params: float, steps: int, rounds: int, variance: float) -> Task:
    return Task(
        methods=[PROFILE, *METHODS],
        rounds=rounds,
        steps=steps,
        warmup=WARMUP,
        params=round(params),
        layers=4,
        compute_ms=compute_ms,
        variance=variance,
        timeout_s=180.0,
    )


def _measure_setting(task: Task, hosts: int, network: str, json_file: Path | None) -> list[Point]:
    layout = layout_of(hosts, network)
    with tempfile.TemporaryDirectory(prefix="gossamer-profile-") as folder:
        samples, rows = measure(
            task,
            layout,
            f"{hosts} x {network}, variance {task.variance:g}:",
            worker="benchmarks.runtime_model.worker",
            variables={FOLDER: folder, STEPS: str(task.steps)},
        )
        profiles = [read_profile(path) for path in sorted(Path(folder).iterdir())]
    if not profiles:
        raise UserError("a prediction needs a profile, got none; what its hosts said is above")
    for profile in profiles:
        fields = profile.model_dump(mode="json")
        _append(json_file, {"kind": "profile", "layout": network, "profile": fields})
    aer = aer_of(layout.hosts_per_node)
    topology_of = {AER: aer} | {name: gossiping_on(name) for name in METHODS if name != AER}
    topologies = [*dict.fromkeys(each for each in topology_of.values() if each)]
    plan, profile = _middle(
        [(make_plan(each, [hosts], topologies=topologies, wires=()), each) for each in profiles]
    )
    waiting = make_plan(profile, [hosts], topologies=topologies, algorithm="atc", wires=())
    predicted = {row.method: row.prediction.mean_s for row in plan.rows}
    predicted_atc = {row.method: row.prediction.mean_s for row in waiting.rows}
    points: list[Point] = []
    for row in rows:
        if row.method == PROFILE:
            continue
        times = times_of_rounds(samples, row.method, statistics.fmean)
        name = topology_of[row.method] or row.method
        waits = NOT_OVERLAPPED in row.method
        points.append(
            Point(
                hosts=hosts,
                network=network,
                variance=task.variance,
                method=row.method,
                measured_ms=statistics.median(times) if times else None,
                lowest_ms=min(times, default=None),
                highest_ms=max(times, default=None),
                predicted_ms=1e3 * (predicted_atc if waits else predicted)[name],
                cpu=row.cpu,
                saturated=row.saturated,
                advised=plan.advice[0].method == name and not waits,
            )
        )
    return points


def _middle(plans: list[tuple[Plan, Profile]]) -> tuple[Plan, Profile]:
    """Return the median round by its plan's time of DDP, which depends on compute and links."""

    def ddp_s(planned: tuple[Plan, Profile]) -> float:
        return next(row.prediction.mean_s for row in planned[0].rows if row.method == DDP)

    return sorted(plans, key=ddp_s)[len(plans) // 2]


def gossiping_on(method: str) -> str:
    """Return the topology of a gossip method; empty for others."""
    if not method.startswith("gossamer("):
        return ""
    return method.removeprefix("gossamer(")[:-1].removesuffix(NOT_OVERLAPPED)


def _append(path: Path | None, fields: dict[str, object]) -> None:
    if path is not None:
        with path.open("a") as file:
            print(json.dumps(fields), file=file)


def _read(path: Path) -> list[Point]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Point(**{key: value for key, value in line.items() if key != "kind"})
        for line in lines
        if line["kind"] == "point"
    ]


if __name__ == "__main__":
    start(main)
