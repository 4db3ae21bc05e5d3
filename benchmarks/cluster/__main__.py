"""Measure training methods on slow links: `python -m benchmarks.cluster --rate 300mbit`."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from benchmarks.cluster.methods import METHODS, NODE_METHODS, missing
from benchmarks.cluster.report import Row, draw, table
from benchmarks.cluster.run import console, environment, layout_of, measure, start
from benchmarks.cluster.worker import WARMUP, Task
from gossamer.errors import UserError


def main(  # noqa: PLR0913 - one parameter per option
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    rate: Annotated[
        list[str] | None,
        typer.Option(help="Rate of the links, or INSIDE/BETWEEN for two nodes; repeatable."),
    ] = None,
    compute_ms: Annotated[float, typer.Option(help="Emulated compute per step.")] = 400.0,
    params: Annotated[float, typer.Option(help="Parameters of the model.")] = 8.4e6,
    layers: Annotated[int, typer.Option(help="Layers that they are split over.")] = 4,
    variance: Annotated[float, typer.Option(help="Of the normalized compute time.")] = 0.0,
    slow: Annotated[float, typer.Option(help="Factor of the first host's compute time.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Timed steps per method and round.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds; each runs every method once.")] = 3,
    method: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
    json_file: Annotated[str, typer.Option("--json", help="JSON lines; default stdout.")] = "-",
    figure: Annotated[Path | None, typer.Option(help="Write bars: .html, .png or .svg.")] = None,
) -> None:
    """Measure step time, bytes on the wire, processor use and memory of training methods."""
    rates = rate or ["300mbit"]
    in_nodes = all("/" in each for each in rates)
    task = Task(
        methods=_methods(method or [*METHODS, *(NODE_METHODS if in_nodes else ())]),
        rounds=rounds,
        steps=steps,
        warmup=WARMUP,
        params=round(params),
        layers=layers,
        compute_ms=compute_ms,
        variance=variance,
        slow=slow,
        timeout_s=120.0,
    )
    all_rows: list[Row] = []
    with _lines(json_file) as lines:
        _write(lines, "run", {**environment(), "hosts": hosts, **asdict(task)})
        for each in rates:
            samples, some = measure(task, layout_of(hosts, each), each)
            for sample in samples:
                _write(lines, "sample", {"rate": each, **sample})
            for row in some:
                _write(lines, "row", asdict(row))
            all_rows += some
    console.print(table(all_rows))
    if figure is not None:
        draw(all_rows, figure)


def _methods(names: list[str]) -> list[str]:
    known = [*METHODS, *NODE_METHODS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"a method must be one of {', '.join(known)}, got {unknown[0]!r}")
    reasons = {name: missing(name) for name in names}
    for name, reason in reasons.items():
        if reason:
            console.print(f"skipped {name}: {reason}", markup=False)
    return [name for name in names if not reasons[name]]


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
    start(main)
