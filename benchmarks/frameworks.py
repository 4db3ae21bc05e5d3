"""The gap in loss between gossip and DDP in frameworks: every example, also with --ddp.

    python -m benchmarks.frameworks --seeds 0,1,2,3,4 --workers 2

Every run is ``torchrun`` with a script of examples/, whose seed, ranks and length are replaced.
Both have the same start and the same batches for one seed, and are compared seed by seed: the
loss of the average of all workers on held-out samples. One JSON line per run, then a table with
95 % intervals.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bench.analysis.statistics import interval

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = {
    "accelerate": "accelerate_prepare.py",
    "lightning": "lightning_strategy.py",
    "transformers": "transformers_trainer.py",
}
LENGTH = {"accelerate": "EPOCHS", "lightning": "EPOCHS", "transformers": "STEPS"}


def run(script: Path, constants: dict[str, int], workers: int, *options: str) -> float:
    """Train once; return the loss that the script prints."""
    source = script.read_text()
    for name, value in constants.items():
        assignment = rf"^(?:\w+, )*{name}\b.* = .+$"
        source = re.sub(assignment, rf"\g<0>; {name} = {value}", source, count=1, flags=re.M)
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder, script.name)
        changed.write_text(source)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(workers), str(changed), *options]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    found = re.search(r"evaluation loss ([\d.]+)", result.stdout)
    if result.returncode or found is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return float(found[1])


def main(
    frameworks: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(SCRIPTS)}.")
    ] = None,
    seeds: str = "0,1,2",
    workers: int = 2,
    length: Annotated[
        int, typer.Option(help="Epochs, or steps of transformers; 0 for the example's.")
    ] = 0,
) -> None:
    """Train every example both ways at every seed."""
    rows: list[str] = []
    for framework in frameworks or [*SCRIPTS]:
        losses: dict[str, list[float]] = {"ddp": [], "gossip": []}
        for seed in map(int, seeds.split(",")):
            constants = {"SEED": seed} | ({LENGTH[framework]: length} if length else {})
            if framework == "lightning":
                constants["RANKS"] = workers
            for way in losses:
                start, options = time.perf_counter(), ["--ddp"] if way == "ddp" else []
                script = EXAMPLES / SCRIPTS[framework]
                losses[way].append(run(script, constants, workers, *options))
                told = {"framework": framework, "way": way, "seed": seed, "loss": losses[way][-1]}
                seconds = round(time.perf_counter() - start, 1)
                print(json.dumps({**told, "seconds": seconds}), flush=True)
        pairs = zip(losses["gossip"], losses["ddp"], strict=True)
        mean, low, high, _ = interval([100 * (gossip / ddp - 1) for gossip, ddp in pairs])
        limits = "–" if low is None or high is None else f"{low:+.2f} to {high:+.2f} %"
        means = [sum(each) / len(each) for each in losses.values()]
        rows.append(f"| {framework} | {means[0]:.4f} | {means[1]:.4f} | {mean:+.2f} % | {limits} |")
    print("| framework | DDP | gossip | gossip above DDP | 95 % interval |")
    print("|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    typer.run(main)
