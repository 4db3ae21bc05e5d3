"""Profile examples/ddp_to_gossip.py in the lab, plan, and measure whether the plan was right.

    python -m benchmarks.runtime_model.example --rate 100mbit --rate 3mbit

At each rate the example runs on two hosts for some epochs: with the two lines that profile it, as
it is, and as examples/ddp.py. One JSON line per rate. A recommendation is right if no other method
was faster by more than the least saving that a plan recommends.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cluster.run import console, start
from gossamer.lab import Cluster, one_switch
from gossamer.runtime_model import read_profile
from gossamer.runtime_model.plan import WORTH_IT, make_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
GOSSIP, DDP = EXAMPLES / "ddp_to_gossip.py", EXAMPLES / "ddp.py"
TOPOLOGY = "one_peer_exponential"
"""Of the example."""

OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
EPOCHS = "EPOCHS = 8\n"
TWO_LINES = """\
from gossamer.runtime_model.measure import measure
measure(model, optimizer, {path!r}, name="examples/ddp_to_gossip.py", steps=60)
"""
_RESULT = "mean step: "
_WARMUP = 20


def main(
    rate: Annotated[list[str], typer.Option(help="Repeatable.")] = ["10gbit", "100mbit", "3mbit"],  # noqa: B006
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 2,
    epochs: Annotated[int, typer.Option(help="Of each run, 3 or more.")] = 8,
    rounds: Annotated[int, typer.Option(help="How often each script is measured.")] = 3,
    run: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Profile, plan and measure the example at some rates."""
    if run:
        _run_script(Path(run))
        return
    for each in rate:
        print(json.dumps(_compare(each, hosts, epochs, rounds)), flush=True)


def _compare(rate: str, hosts: int, epochs: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gossamer-example-") as folder:
        path = Path(folder) / "profile.json"
        shorter = {EPOCHS: f"EPOCHS = {epochs}\n"}
        two_lines = {OPTIMIZER: OPTIMIZER + TWO_LINES.format(path=str(path))}
        ddp = _changed(DDP, Path(folder) / "ddp.py", shorter)
        gossip = _changed(GOSSIP, Path(folder) / "gossip.py", shorter)
        with Cluster(one_switch(hosts, rate)) as cluster:
            _step_ms(cluster, _changed(gossip, Path(folder) / "profiled.py", two_lines))
            measured = [(_step_ms(cluster, ddp), _step_ms(cluster, gossip)) for _ in range(rounds)]
        profile = read_profile(path)
    plan = make_plan(profile, [hosts], topologies=[TOPOLOGY])
    ddp_ms, gossip_ms = (statistics.median(column) for column in zip(*measured, strict=True))
    advice = plan.advice[0]
    measured_ms = {"ddp": ddp_ms, TOPOLOGY: gossip_ms}
    return {
        "rate": rate,
        "advice": advice.method,
        "reason": advice.reason,
        "predicted_ms": {row.method: 1e3 * row.prediction.mean_s for row in plan.rows},
        "ddp_ms": ddp_ms,
        "gossip_ms": gossip_ms,
        "rounds_ms": measured,
        "right": measured_ms[advice.method] <= (1 + WORTH_IT) * min(measured_ms.values()),
        "profile": profile.model_dump(mode="json", exclude={"factors", "pairs"}),
    }


def _changed(script: Path, copy: Path, changes: dict[str, str]) -> Path:
    source = script.read_text()
    for before, after in changes.items():
        assert before in source
        source = source.replace(before, after)
    copy.write_text(source)
    return copy


def _step_ms(cluster: Cluster, script: Path) -> float:
    """Return the mean time between two steps of the optimizer, over hosts."""
    found: list[float] = []

    def collect(host: str, line: str) -> None:
        if line.startswith(_RESULT):
            found.append(float(line.removeprefix(_RESULT)))
        else:
            console.print(f"[{host}] {line}", markup=False)

    command = [sys.executable, "-m", "benchmarks.runtime_model.example", "--run", str(script)]
    cluster.run(command, sink=collect, timeout_s=600)
    return statistics.fmean(found)


def _run_script(script: Path) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    stamps: list[float] = []
    register_optimizer_step_post_hook(lambda *_: stamps.append(time.perf_counter()))
    runpy.run_path(str(script), run_name="__main__")
    intervals = [b - a for a, b in itertools.pairwise(stamps[_WARMUP:])]
    print(f"{_RESULT}{1e3 * statistics.fmean(intervals)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    start(main)
