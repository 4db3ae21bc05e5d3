"""The gap in loss between gossip and DDP in the scripts of docs/nanogpt.md, on processes.

    python -m benchmarks.nanogpt --seeds 0,1,2,3,4 --workers 4

Every run is ``torchrun`` with examples/nanogpt_ddp.py or nanogpt_gossip.py, whose settings are
given on its command line. Methods of one seed have the same batches and the same start, and are
compared with DDP seed by seed: the loss, in nats, of the average of all workers on held-out bytes.
One JSON line per run, then a table with 95 % intervals.
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
    "ddp_adamw": ["nanogpt_ddp.py"],
    "adamw_awc": ["nanogpt_gossip.py", "--smoothing=0"],  # without smoothing it is AdamW
    "smooth_awc": ["nanogpt_gossip.py"],
    "smooth_atc": ["nanogpt_gossip.py", "--algorithm=atc"],
}


def run(arguments: list[str], workers: int) -> float:
    """Train once; return the last validation loss."""
    script, *settings = arguments
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(workers), str(EXAMPLES / script)]
        command += [*settings, f"--out_dir={folder}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    losses = re.findall(r"val loss ([\d.]+)", result.stdout)
    if result.returncode or not losses:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return float(losses[-1])


def main(
    methods: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(SCRIPTS)}.")] = None,
    seeds: str = "0,1,2",
    workers: int = 4,
    batch_size: int = 4,
    accumulation: Annotated[int, typer.Option(help="Backward passes of a worker per step.")] = 2,
    lr: Annotated[str, typer.Option(help="Learning rates; the table is of each method's best.")] = (
        "3e-3"
    ),
    steps: int = 400,
    eval_iters: int = 20,
) -> None:
    """Train every method at every rate and seed."""
    names = ["ddp_adamw", *(name for name in methods or SCRIPTS if name != "ddp_adamw")]
    found: dict[tuple[str, str], list[float]] = {}
    for seed in seeds.split(","):
        for name in names:
            for rate in lr.split(","):
                settings = [f"--seed={seed}", f"--max_iters={steps}", f"--eval_interval={steps}"]
                settings += [f"--learning_rate={rate}", f"--min_lr={float(rate) / 10}"]
                settings += [f"--batch_size={batch_size}", f"--eval_iters={eval_iters}"]
                settings += [f"--gradient_accumulation_steps={accumulation * workers}"]
                start = time.perf_counter()
                loss = run([*SCRIPTS[name], *settings], workers)
                found.setdefault((name, rate), []).append(loss)
                told = {"method": name, "seed": int(seed), "lr": float(rate), "loss": loss}
                told |= {"seconds": round(time.perf_counter() - start, 1)}
                print(json.dumps(told), flush=True)
    print("| method | best rate | validation loss | above DDP | 95 % interval |")
    print("|---|---|---|---|---|")
    best = {
        name: min((sum(found[name, rate]), rate) for rate in lr.split(","))[1] for name in names
    }
    reference = found["ddp_adamw", best["ddp_adamw"]]
    for name, rate in best.items():
        losses = found[name, rate]
        gaps = [100 * (own / ddp - 1) for own, ddp in zip(losses, reference, strict=True)]
        mean, low, high, _ = interval(gaps)
        limits = "–" if low is None or high is None else f"{low:+.2f} to {high:+.2f} %"
        print(f"| {name} | {rate} | {sum(losses) / len(losses):.4f} | {mean:+.2f} % | {limits} |")


if __name__ == "__main__":
    typer.run(main)
