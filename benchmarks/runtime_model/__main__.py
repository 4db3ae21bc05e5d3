"""Predicted against measured iteration times in the lab: `python -m benchmarks.runtime_model`.

In every setting a profile is taken first, by training without communication; the model sees nothing
else. Then each method is measured as in benchmarks.cluster.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cluster.report import Row
from benchmarks.cluster.run import console, environment, measure, start
from benchmarks.cluster.worker import WARMUP, Task
from benchmarks.runtime_model.score import Point, score, table
from benchmarks.runtime_model.worker import PATH, PROFILE, STEPS
from gossamer.errors import UserError
from gossamer.lab import Layout, one_switch, parse_layout
from gossamer.runtime_model import Profile, read_profile
from gossamer.runtime_model.plan import Plan, make_plan

HETEROGENEOUS = "1gbit/300mbit"
METHODS = (
    *("ddp", "gossamer(ring)", "gossamer(one_peer_exponential)"),
    *("gossamer(aer)", "gossamer(complete)"),
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
    rounds: Annotated[int, typer.Option(help="Rounds; each runs every method once.")] = 1,
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
    layout = _layout(hosts, network)
    with tempfile.TemporaryDirectory(prefix="gossamer-profile-") as folder:
        path = Path(folder) / "profile.json"
        _, rows = measure(
            task,
            layout,
            f"{hosts} x {network}, variance {task.variance:g}:",
            worker="benchmarks.runtime_model.worker",
            variables={PATH: str(path), STEPS: str(task.steps)},
        )
        profile = read_profile(path)
    _append(json_file, {"kind": "profile", "network": network, **profile.model_dump(mode="json")})
    return points_of(profile, rows, hosts, network, task.variance)


def points_of(
    profile: Profile, rows: list[Row], hosts: int, network: str, variance: float
) -> list[Point]:
    """Return measured rows beside what the profile predicts."""
    per_node = max(2, profile.network.workers_per_node)  # as worker.py builds it
    topology_of = {name: name[9:-1] for name in METHODS if name.startswith("gossamer(")}
    topology_of["gossamer(aer)"] = f"aer(workers_per_node={per_node})"
    plan = make_plan(profile, [hosts], topologies=list(topology_of.values()))
    return [
        _point(plan, row, topology_of.get(row.method, row.method), hosts, network, variance)
        for row in rows
        if row.method != PROFILE
    ]


def _point(plan: Plan, row: Row, name: str, hosts: int, network: str, variance: float) -> Point:
    predicted = next(each for each in plan.rows if each.method == name)
    return Point(
        hosts=hosts,
        network=network,
        variance=variance,
        method=row.method,
        measured_ms=row.ms_per_step,
        lowest_ms=row.ms_lowest,
        highest_ms=row.ms_highest,
        predicted_ms=1e3 * predicted.prediction.mean_s,
        cpu=row.cpu,
        saturated=row.saturated,
        advised=plan.advice[0].method == name,
    )


def _layout(hosts: int, network: str) -> Layout:
    if "/" not in network:
        return one_switch(hosts, network)
    return parse_layout(f"2x{hosts // 2}:{network}")


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
