"""Run a task's methods on the hosts of a layout, and collect what they measured."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from benchmarks.cluster.report import Row, Sample, rows
from benchmarks.cluster.worker import SAMPLE, Task
from gossamer.errors import UserError
from gossamer.lab import Cluster, HostFailed, Layout, one_switch, parse_layout

_SCHEMA = 1
console = Console(stderr=True, highlight=False, width=120)


def start(main: Callable[..., None]) -> None:
    """Run a benchmark from the command line; a UserError is one line and exit code 2."""
    try:
        typer.run(main)
    except UserError as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(2)


def layout_of(hosts: int, network: str) -> Layout:
    """Return hosts on one switch with a rate, or for INSIDE/BETWEEN in two nodes."""
    if "/" not in network:
        return one_switch(hosts, network)
    if hosts % 2:
        raise UserError(f"two nodes need an even number of hosts, got {hosts}; give --hosts 8")
    return parse_layout(f"2x{hosts // 2}:{network}")


def measure(
    task: Task,
    layout: Layout,
    rate: str,
    *,
    worker: str = "benchmarks.cluster.worker",
    variables: Mapping[str, str] | None = None,
) -> tuple[list[Sample], list[Row]]:
    """Return the raw samples and a row per method.

    Args:
        task: what is measured.
        layout: hosts and links.
        rate: the name of the links in the rows.
        worker: the module that runs on each host.
        variables: added to its environment.
    """
    samples: list[Sample] = []

    def collect(host: str, line: str) -> None:
        if not line.startswith(SAMPLE):
            console.print(f"[{host}] {line}", markup=False)
            return
        sample: Sample = json.loads(line.removeprefix(SAMPLE))
        samples.append(sample)
        if sample["rank"] == 0:
            result = sample.get("error") or f"{sample['ms_per_step']:.0f} ms"
            console.print(f"{rate} round {sample['round']} {sample['method']}: {result}")

    command = [sys.executable, "-m", worker, task.to_json()]
    quiet = {"LOGURU_LEVEL": "WARNING", "OMP_NUM_THREADS": "1", **(variables or {})}
    with Cluster(layout) as cluster:
        try:
            cluster.run(command, environment=quiet, sink=collect)
        except HostFailed as error:
            # The rounds measured so far still make a row.
            console.print(str(error), markup=False)
    return samples, rows(samples, rate, min(host.rate_bits_s for host in layout.hosts))


def environment() -> dict[str, Any]:
    """Return the facts about the machine that a run's first record has."""
    return {
        "schema": _SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "torch": torch.__version__,
        "kernel": platform.release(),
        "processors": _processors(),
    }


def _processors() -> str:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(models)} x {models[0] if models else 'unknown'}"
