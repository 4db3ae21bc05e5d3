"""The cost of a step without a network: `python -m benchmarks.step --workers 4` on loopback.

All workers share this machine's processors, so the difference between methods is the work that they
add: passes over memory, copies through the kernel, threads. Methods and samples are those of
benchmarks.cluster, interleaved in the same way; compute is real and small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.cluster.methods import METHODS, missing
from benchmarks.cluster.report import Sample, rows, table
from benchmarks.cluster.worker import SAMPLE, Task

_console = Console(stderr=True, highlight=False, width=120)
_LOOPBACK = "lo"
_TIMEOUT_S = 900


def main(
    workers: Annotated[int, typer.Option(help="Number of workers.")] = 4,
    params: Annotated[float, typer.Option(help="Parameters of the model.")] = 4.2e6,
    steps: Annotated[int, typer.Option(help="Timed steps per method and round.")] = 15,
    rounds: Annotated[int, typer.Option(help="Rounds; each runs every method once.")] = 5,
    method: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
) -> None:
    """Measure step time, processor use and memory of training methods on loopback."""
    task = Task(
        methods=[name for name in method or METHODS if not missing(name)],
        rounds=rounds,
        steps=steps,
        warmup=3,
        params=round(params),
        layers=4,
        compute_ms=0,
        variance=0,
        timeout_s=120,
    )
    command = [sys.executable, "-m", "benchmarks.cluster.worker", task.to_json()]
    processes = [
        subprocess.Popen(
            command, env=_environment(rank, workers), stdout=subprocess.PIPE, text=True
        )
        for rank in range(workers)
    ]
    samples: list[Sample] = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
            lines = (line for line in output.splitlines() if line.startswith(SAMPLE))
            samples += [json.loads(line.removeprefix(SAMPLE)) for line in lines]
    finally:
        for process in processes:
            with process:  # closes its pipe, and joins
                process.kill()  # no effect if it has ended
    results = rows(samples, _LOOPBACK, sys.maxsize)
    for row in results:
        print(json.dumps(asdict(row)))
    _console.print(table(results))


def _environment(rank: int, workers: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "OMP_NUM_THREADS": "1",
        "LOGURU_LEVEL": "WARNING",
    }


if __name__ == "__main__":
    typer.run(main)
