"""Step times of this code and of another commit, interleaved.

    python -m benchmarks.against cd1c814 step --workers 4 --method 'gossamer(ring)'
    python -m benchmarks.against cd1c814 cluster --rate 300mbit --method 'gossamer(ring)'

One process cannot load two commits, and the times of the same code vary between processes and from
minute to minute. So the benchmark alternates between both commits, and reports the median over
turns of the ratio of their times, for each method. The other commit is checked out in a temporary
worktree; both use this environment's packages.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gossamer.errors import UserError

_ROOT = Path(__file__).parents[1]

BENCHMARKS = ("step", "cluster")


def main(
    context: typer.Context,
    commit: Annotated[str, typer.Argument(help="The other commit.")],
    benchmark: Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHMARKS)}.")],
    turns: Annotated[int, typer.Option(help="How often each commit runs.")] = 5,
) -> None:
    """Run a benchmark with this code and with another commit; further options are passed to it."""
    if benchmark not in BENCHMARKS:
        raise UserError(f"a benchmark must be one of {', '.join(BENCHMARKS)}, got {benchmark!r}")
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "other")
        _git("worktree", "add", "--detach", str(other), commit)
        try:
            for turn in range(turns):
                # Alternate which one is first.
                order = (_ROOT, other) if turn % 2 else (other, _ROOT)
                times = {tree: _times(tree, benchmark, context.args) for tree in order}
                for method, before in times[other].items():
                    ratios.setdefault(method, []).append(times[_ROOT][method] / before)
                    told = {"method": method, "before_ms": before, "now_ms": times[_ROOT][method]}
                    print(json.dumps({"turn": turn, **told}), flush=True)
        finally:
            _git("worktree", "remove", "--force", str(other))
    for method, of_turns in ratios.items():
        low, high = min(of_turns), max(of_turns)
        told = {"method": method, "ratio": round(statistics.median(of_turns), 4)}
        print(json.dumps({**told, "lowest": round(low, 4), "highest": round(high, 4)}))


def _times(tree: Path, benchmark: str, options: list[str]) -> dict[str, float]:
    """Return the milliseconds of a step of each method, measured with the code of a checkout."""
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *options]
    output = subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["method"]: line["ms_per_step"] for line in lines if "ms_per_step" in line}


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(_ROOT), *arguments], check=True, capture_output=True)


app = typer.Typer(add_completion=False)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)

if __name__ == "__main__":
    app()
