"""The time of imports: `python -m benchmarks.imports [--rounds 9]`.

Every import runs in its own interpreter, interleaved. One JSON line each: the median
seconds, and the median over rounds of the ratio to `import torch` in the same round. Seconds are
CPU time, which other jobs disturb less than wall time. Commands are timed as processes;
imports are timed inside, without the start of the interpreter.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable

import typer

IMPORTS = (
    "import torch",
    "import gossamer",
    "from gossamer import decentralize",
    "from gossamer import Simulation",
    "import gossamer.topology",
)
COMMANDS = ("--help", "topology -n 16")


def main(rounds: int = 9) -> None:
    """Print one JSON line per import and command."""
    tasks: dict[str, Callable[[], float]] = {
        **{statement: lambda s=statement: import_s(s) for statement in IMPORTS},
        **{f"gossamer {command}": lambda c=command: command_s(c) for command in COMMANDS},
    }
    for task in tasks.values():
        task()  # fills the page cache
    times = [{name: task() for name, task in tasks.items()} for _ in range(rounds)]
    for name in tasks:
        ratios = [once[name] / once["import torch"] for once in times]
        result = {
            "what": name,
            "seconds": round(statistics.median(once[name] for once in times), 3),
            "ratio_to_torch": round(statistics.median(ratios), 3),
            "rounds": rounds,
        }
        print(json.dumps(result), flush=True)


def import_s(statement: str) -> float:
    """Return the seconds that an import takes in a fresh interpreter."""
    program = (
        f"import time\nstart = time.process_time()\n{statement}\nprint(time.process_time() - start)"
    )
    command = [sys.executable, "-c", program]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def command_s(arguments: str) -> float:
    """Return the seconds that a command takes from its start to its end."""
    command = [sys.executable, "-m", "gossamer", *arguments.split()]
    start = os.times()
    subprocess.run(command, check=True, capture_output=True)
    end = os.times()
    return sum(end[2:4]) - sum(start[2:4])  # of children: user and system


if __name__ == "__main__":
    typer.run(main)
