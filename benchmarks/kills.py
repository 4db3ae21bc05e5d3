"""What a run loses by kill -9 of its runner or its own process, at random moments.

    python -m benchmarks.kills [--kills 50] [--every 0.5] [--engine simulated] [--seed 0] [--json]

One run of ``digits-mlp`` is killed repeatedly: alternately its runner and its process, which is
then retried. Prints for each kill: the step of the run and of its checkpoint, what is lost in steps
and in seconds of training since the checkpoint was saved or the run resumed from it, and how long
processes of the killed one survived. At the end the run is left to finish, and its records are
compared with those of a run that was never killed. A process is only killed while it trains, so
starts without a checkpoint are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.bench import Store, expand
from gossamer.bench.experiment import parse
from gossamer.engine import Checkpointing, RunSpec
from gossamer.records import Ended, Evaluation, Record, Step
from tests.processes import descendants, is_there

_EXPERIMENT = """
name = "kills"
workload = "digits-mlp"
engine = "{engine}"
workers = 4
methods = ["D_ring"]
run = {{ epochs = 100, steps_per_epoch = {steps}, log_every = 5, evaluate_every = 10 }}
"""
_LONGEST_S = 120.0
"""How long a run may take until its first step."""


class Folder(NamedTuple):
    """An experiment of one run."""

    path: Path
    every_s: float
    spec: RunSpec

    @property
    def store(self) -> Store:
        """The store of its records."""
        return Store(self.path / "out")

    @property
    def checkpoint(self) -> Checkpointing:
        """The folder of its checkpoint."""
        return Checkpointing(self.store.checkpoint_folder(self.spec.id))

    def start(self) -> subprocess.Popen[bytes]:
        """Start a runner."""
        options = ["--jobs", "1", "--retry", "--checkpoint-every", str(self.every_s)]
        command = [*("bench", "run", str(self.path / "kills.toml")), *options]
        return subprocess.Popen(
            [sys.executable, "-m", "gossamer", *command, "--out", str(self.store.folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def part(self) -> Path | None:
        """Return the file that is being written, and not one that a killed run has left."""
        parts = (self.store.folder / "runs").glob("*.part")
        return next((path for path in parts if is_there(_process_of(path))), None)

    def num_steps(self) -> int:
        """Return the number of steps of the run in progress."""
        path = self.part()
        lines = path.read_text().splitlines() if path else []
        steps = [line for line in lines if line.startswith('{"kind":"step"') and line[-1] == "}"]
        return json.loads(steps[-1])["step"] if steps else 0


def kill_once(folder: Folder, victim: str, chance: random.Random) -> dict[str, Any]:
    """Start the runner and kill it, or the run, at a random moment of training."""
    before = folder.checkpoint.step or 0
    runner = folder.start()
    deadline = time.monotonic() + _LONGEST_S
    while folder.num_steps() <= before and runner.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not begin to train")
        time.sleep(0.01)
    seen = time.monotonic()
    time.sleep(chance.uniform(0, 3 * folder.every_s))
    path = folder.part()
    if runner.poll() is not None or path is None:
        runner.kill()
        runner.wait()
        raise EOFError  # it has finished
    started = descendants(runner.pid)
    process = runner.pid if victim == "runner" else _process_of(path)
    lost_s = min(_saved_s(folder), time.monotonic() - seen)
    steps = folder.num_steps()
    own = descendants(process) if victim == "run" else started
    os.kill(process, signal.SIGKILL)
    killed = time.monotonic()
    while any(map(is_there, own)) and time.monotonic() < killed + 30:
        time.sleep(0.005)
    behind_s = time.monotonic() - killed
    runner.wait()
    saved = folder.checkpoint.step or 0
    row = {
        "victim": victim,
        "step": steps,
        "checkpoint": saved,
        "lost_steps": max(0, steps - saved),
    }
    return row | {"lost_s": lost_s, "left_behind_s": behind_s}


def _process_of(part: Path) -> int:
    return int(part.name.split(".")[1])


def _saved_s(folder: Folder) -> float:
    """Return the age of the checkpoint in seconds."""
    manifests = [*folder.checkpoint.folder.glob("step-*/checkpoint.json")]
    return time.time() - max((path.stat().st_mtime for path in manifests), default=time.time())


def timeless(records: list[Record]) -> list[Record]:
    """Return records without the times, which differ between repetitions."""
    return [
        record.model_copy(update={"train_s": 0.0})
        if isinstance(record, Step | Evaluation | Ended)
        else record
        for record in records
    ]


def rows(folder: Folder, num_kills: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one row per kill, as long as the run has not ended."""
    chance = random.Random(seed)
    for number in range(num_kills):
        try:
            yield kill_once(folder, ("runner", "run")[number % 2], chance)
        except EOFError:
            return


def main() -> None:
    """Print the table, and how many records differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between checkpoints")
    parser.add_argument("--engine", choices=("simulated", "distributed"), default="simulated")
    parser.add_argument("--steps", type=int, default=300, help="per epoch, of 100")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    text = _EXPERIMENT.format(engine=options.engine, steps=options.steps)
    (spec,) = expand(parse(text, "kills.toml")).runs
    with tempfile.TemporaryDirectory(prefix="gossamer-kills-") as name:
        folder = Folder(Path(name), options.every, spec)
        (folder.path / "kills.toml").write_text(text)
        found: list[dict[str, Any]] = []
        if not options.json:
            print("| killed | at step | checkpoint | steps lost | s lost | s left behind |")
            print("|---|---|---|---|---|---|")
        for row in rows(folder, options.kills, options.seed):
            found.append(row)
            cells = [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()]
            print(json.dumps(row) if options.json else f"| {' | '.join(cells)} |", flush=True)
        folder.start().wait()
        ours = folder.store.read(spec.id).records
        other = Folder(folder.path / "whole", 0.0, spec)
        other.path.mkdir()
        (other.path / "kills.toml").write_text(text)
        other.start().wait()
        whole = other.store.read(spec.id).records
    pairs = zip(timeless(ours)[1:], timeless(whole)[1:], strict=True)
    summary = {
        "kills": len(found),
        "most_lost_s": max((row["lost_s"] for row in found), default=0.0),
        "most_left_behind_s": max((row["left_behind_s"] for row in found), default=0.0),
        "records": len(whole),
        "records_that_differ": sum(one != two for one, two in pairs),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
