"""Measure training methods on slow links: `python -m benchmarks.cluster --rate 300mbit`."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import sys
from collections.abc import Generator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.cluster.methods import METHODS, missing
from benchmarks.cluster.report import Row, Sample, rows, table
from benchmarks.cluster.worker import SAMPLE, Task
from gossamer.errors import UserError
from gossamer.lab import Cluster, HostFailed, one_switch

_SCHEMA = 1
_console = Console(stderr=True, highlight=False, width=120)


def main(  # noqa: PLR0913 - one parameter per option
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    rate: Annotated[list[str] | None, typer.Option(help="Rate of the links; repeatable.")] = None,
    compute_ms: Annotated[float, typer.Option(help="Emulated compute per step.")] = 400.0,
    params: Annotated[float, typer.Option(help="Parameters of the model.")] = 8.4e6,
    layers: Annotated[int, typer.Option(help="Layers that they are split over.")] = 4,
    variance: Annotated[float, typer.Option(help="Of the normalized compute time.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Timed steps per method and round.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds; each runs every method once.")] = 3,
    method: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
    json_file: Annotated[str, typer.Option("--json", help="JSON lines; default stdout.")] = "-",
) -> None:
    """Measure step time, bytes on the wire, processor use and memory of training methods."""
    task = Task(
        methods=_methods(method or list(METHODS)),
        rounds=rounds,
        steps=steps,
        warmup=3,
        params=round(params),
        layers=layers,
        compute_ms=compute_ms,
        variance=variance,
        timeout_s=120.0,
    )
    all_rows: list[Row] = []
    with _lines(json_file) as lines:
        _write(lines, "run", {**_environment(), "hosts": hosts, **asdict(task)})
        for each in rate or ["300mbit"]:
            samples, some = _measure(task, hosts, each)
            for sample in samples:
                _write(lines, "sample", {"rate": each, **sample})
            for row in some:
                _write(lines, "row", asdict(row))
            all_rows += some
    _console.print(table(all_rows))


def _methods(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise UserError(f"a method must be one of {', '.join(METHODS)}, got {unknown[0]!r}")
    reasons = {name: missing(name) for name in names}
    for name, reason in reasons.items():
        if reason:
            _console.print(f"skipped {name}: {reason}", markup=False)
    return [name for name in names if not reasons[name]]


def _measure(task: Task, hosts: int, rate: str) -> tuple[list[Sample], list[Row]]:
    layout = one_switch(hosts, rate)
    samples: list[Sample] = []

    def collect(host: str, line: str) -> None:
        if not line.startswith(SAMPLE):
            _console.print(f"[{host}] {line}", markup=False)
            return
        sample: Sample = json.loads(line.removeprefix(SAMPLE))
        samples.append(sample)
        if sample["rank"] == 0:
            result = sample.get("error") or f"{sample['ms_per_step']:.0f} ms"
            _console.print(f"{rate} round {sample['round']} {sample['method']}: {result}")

    command = [sys.executable, "-m", "benchmarks.cluster.worker", task.to_json()]
    environment = {"LOGURU_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    with Cluster(layout) as cluster:
        try:
            cluster.run(command, environment=environment, sink=collect)
        except HostFailed as error:
            # What was measured before is worth a row.
            _console.print(str(error), markup=False)
    return samples, rows(samples, rate, min(host.rate_bits_s for host in layout.hosts))


def _environment() -> dict[str, Any]:
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
        for line in _read("/proc/cpuinfo").split("\n")
        if line.startswith("model name")
    ]
    return f"{len(models)} x {models[0] if models else 'unknown'}"


def _read(path: str) -> str:
    return Path(path).read_text().strip()


def _write(lines: IO[str], kind: str, fields: dict[str, Any]) -> None:
    known = {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in fields.items()
    }
    print(json.dumps({"kind": kind, **known}), file=lines, flush=True)


@contextlib.contextmanager
def _lines(name: str) -> Generator[IO[str]]:
    if name == "-":
        yield sys.stdout
        return
    with Path(name).open("w") as file:
        yield file


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        _console.print(f"error: {error}", markup=False)
        sys.exit(2)
