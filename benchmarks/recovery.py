"""Recovery time after one of four workers is killed, with gossamer and with torchft.

    python -m benchmarks.recovery [--rounds 5] [--timeout 5]

Compares gossip, and an average over all workers in every step, with torchft's fault-tolerant DDP
over Gloo and its lighthouse (``pip install '.[peers]'``), which all-reduces gradients. Every method
trains the same model at the same pace with the same timeout, in processes forked from one parent;
methods are interleaved. *Seconds* is the time from the kill until the last survivor has completed a
step without the lost worker, *steps lost* counts steps that survivors computed and discarded.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks import survival
from benchmarks.survival import FAULT_STEP, Running, Scene

_VICTIM, _OTHERS = 2, (0, 1, 3)
_START_S = 120.0


def _ours(topology: str, algorithm: str) -> Callable[[float], Running]:
    def start(timeout_s: float) -> Running:
        return survival.start(Scene(topology=topology, algorithm=algorithm, timeout_s=timeout_s))

    return start


def _torchft(*options: str) -> Callable[[float], Running]:
    """Return a function that starts the lighthouse, and replicas of one worker each."""

    def start(timeout_s: float) -> Running:
        scene = Scene(timeout_s=timeout_s)
        folder = Path(tempfile.mkdtemp(prefix="gossamer-recovery-"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))
        assert program is not None, "torchft comes with it"
        command = [program, "--min_replicas", "1", "--bind", f"[::]:{port}", *options]
        holder = survival.fork(lambda: os.execv(program, command), folder / "store.log")
        workers = {
            rank: survival.fork(
                lambda rank=rank: _work_by_torchft(scene, rank, folder, port),
                folder / f"{rank}.log",
            )
            for rank in range(scene.num_workers)
        }
        return Running(scene, folder, holder, workers)

    return start


def _work_by_torchft(scene: Scene, rank: int, folder: Path, port: int) -> None:
    import torchft  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(rank)
    model = nn.Linear(200, 100)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    timeout = timedelta(seconds=scene.timeout_s)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=1,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        replica_id=f"worker{rank}",
        hostname="127.0.0.1",
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, sgd)
    with (folder / f"{rank}.steps").open("w", buffering=1) as file:
        while manager.current_step() < scene.num_steps:
            time.sleep(scene.pace_s)
            optimizer.zero_grad()
            wrapped(torch.randn(8, 200)).square().mean().backward()
            optimizer.step()
            file.write(f"{time.time()} {manager.current_step()} {manager.num_participants()}\n")
    # Exit at once: torchft's threads may outlive the timeouts of its peers.
    os._exit(0)


METHODS: dict[str, Callable[[float], Running]] = {
    "one_peer_exponential": _ours("one_peer_exponential", "awc"),
    "complete, atc": _ours("complete", "atc"),
    "torchft": _torchft(),
    "torchft, heartbeats of 1 s": _torchft("--heartbeat_timeout_ms", "1000"),
}


def kill_one(running: Running) -> tuple[float, int]:
    """Kill a worker while all train together; return the recovery time, and steps lost."""
    num_workers = running.scene.num_workers
    deadline = time.monotonic() + _START_S
    while not all(_is_under_way(running, worker) for worker in range(num_workers)):
        if time.monotonic() > deadline:
            logs = "\n".join(running.log_of(worker)[-1000:] for worker in running.workers)
            raise TimeoutError(f"workers were not under way within {_START_S:g} s:\n{logs}")
        time.sleep(0.01)
    at = running.kill(_VICTIM)
    running.wait(6 * running.scene.timeout_s + 30)
    seconds = max(
        survival.seconds_until_step(running, worker, at, num_workers - 1) for worker in _OTHERS
    )
    steps = [[t.step for t in running.taken(worker) if t.at > at] for worker in _OTHERS]
    return seconds, sum(a == b for taken in steps for a, b in pairwise(taken))


def _is_under_way(running: Running, worker: int) -> bool:
    taken = running.taken(worker)
    together = bool(taken) and taken[-1].num_workers == running.scene.num_workers
    return together and taken[-1].step >= FAULT_STEP


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=5.0, help="of all methods, in seconds")
    options = parser.parse_args()
    methods = dict(METHODS)
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed; pip install 'gossamer[peers]'", file=sys.stderr)
        methods = {name: start for name, start in methods.items() if "torchft" not in name}
    survival.warm_up()
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in methods}
    for _ in range(options.rounds):
        for name, start in methods.items():
            running = start(options.timeout)
            try:
                found[name].append(kill_one(running))
            finally:
                running.close()
    print(
        "| method | seconds, median | least | most | steps lost per kill |\n|---|---|---|---|---|"
    )
    for name, rows in found.items():
        seconds, lost = [row[0] for row in rows], [row[1] for row in rows]
        print(
            f"| {name} | {median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} "
            f"| {sum(lost) / len(lost):.1f} |"
        )


if __name__ == "__main__":
    main()
