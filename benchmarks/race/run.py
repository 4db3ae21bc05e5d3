"""Run a race on the hosts of a lab, and collect what they print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from benchmarks.cluster.run import console
from benchmarks.race.report import Point
from benchmarks.race.worker import END, POINT, Task
from gossamer.lab import Cluster, HostFailed, one_switch


def run_on_hosts(
    task: Task,
    hosts: int,
    rate: str,
    add: Callable[[Point], None],
    end: Callable[[str], None],
) -> None:
    """Train with each of a task's methods.

    Args:
        task: what is trained.
        hosts: how many hosts train it.
        rate: of their links.
        add: called with each point as it arrives.
        end: called with the name of each method that has finished.
    """

    def collect(host: str, line: str) -> None:
        if line.startswith(POINT):
            add(Point(rate, **json.loads(line.removeprefix(POINT))))
        elif line.startswith(END):
            end(json.loads(line.removeprefix(END)))
        else:
            console.print(f"[{host}] {line}", markup=False)

    command = [sys.executable, "-m", "benchmarks.race.worker", task.to_json()]
    quiet = {"OMP_NUM_THREADS": "1", "LOGURU_LEVEL": "WARNING"}
    with Cluster(one_switch(hosts, rate)) as cluster:
        try:
            cluster.run(command, environment=quiet, sink=collect)
        except HostFailed as error:
            console.print(str(error), markup=False)
