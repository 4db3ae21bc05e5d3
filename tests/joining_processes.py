"""A worker joins while a donor or itself is killed, in real processes: one JSON line per story.

    python -m tests.joining_processes

Worker 1 of 4 is killed, and another process takes its place. All are forked from one process that
has imported torch, so a story takes one second instead of ten.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.gossip import Gossip, decentralize
from gossamer.gossip.network import Network
from gossamer.launched import JOINS, RETURNED

NUM_WORKERS = 4
LOST_AT = 5
PATIENCE_S = 90.0


def kill() -> None:
    """End this process as the kernel's out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_donor(folder: Path, worker: int) -> None:
    """Let the first donor end after it has sent one part."""
    send_all = Network.send

    def send(network: Network, data: bytes, receiver: int, each_part: Callable[[], object]) -> None:
        try:
            (folder / "killed").open("x").write(str(worker))
        except FileExistsError:
            send_all(network, data, receiver, each_part)
            return
        lane = network._open_lane(network.rank, receiver)
        header = torch.zeros(40, dtype=torch.uint8)
        header[2] = 1  # it announces 65,536 bytes, which never arrive
        lane.send([header], 1, 1 << 29).wait()
        each_part()
        kill()

    setattr(Network, "send", send)  # noqa: B010


def kill_joiner(folder: Path, worker: int) -> None:
    """Let the worker that joins end before it receives its state."""

    def receive(network: Network, sender: int, each_part: Callable[[], object]) -> bytes:
        (folder / "killed").write_text(str(worker))
        kill()
        return b""

    setattr(Network, "receive", receive)  # noqa: B010


STORIES = {"its donor is killed": kill_donor, "is killed as it joins": kill_joiner}
"""What happens while worker 1 joins again."""


def work(folder: Path, port: int, worker: int) -> None:
    """Train as one worker until the step in the file ``until``."""
    torch.set_num_threads(1)
    torch.manual_seed(worker)
    store = TCPStore("127.0.0.1", port, is_master=False)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    gossip = decentralize(
        model,
        optimizer,
        "ring",
        process_group=dist.ProcessGroup(store, worker, NUM_WORKERS),
        on_failure="continue",
        timeout=timedelta(seconds=10),
    )
    is_back = gossip.num_steps > 0
    until = folder / "until"
    while not until.exists() or gossip.num_steps < int(until.read_text()):
        if worker == 1 and not is_back and gossip.num_steps == LOST_AT:
            kill()
        if is_over(gossip, worker, is_back=is_back) and not until.exists():
            (folder / "part").write_text(str(gossip.num_steps + 10))
            (folder / "part").rename(until)
        time.sleep(0.005)
        optimizer.zero_grad()
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
    gossip.finalize()
    norm = float(model.weight.detach().norm())
    (folder / f"{worker}.json").write_text(json.dumps([gossip.members, gossip.num_steps, norm]))


def is_over(gossip: Gossip, worker: int, *, is_back: bool) -> bool:
    """Return whether the story is over: the worker has joined, or was lost a second time."""
    return is_back or (worker == 0 and gossip.stats().failures > 1)


def fork(log: Path, body: Callable[[], None]) -> int:
    """Run a function in a process of its own."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
        body()
        sys.exit()
    return pid


def tell(name: str, port: int) -> dict[str, object]:
    """Run one story; return its outcome."""
    folder = Path(tempfile.mkdtemp(prefix="gossamer-joining-"))

    def start(worker: int) -> int:
        def body() -> None:
            STORIES[name](folder, worker)
            work(folder, port, worker)

        return fork(folder / f"{worker}.log", body)

    running = {start(worker): worker for worker in range(NUM_WORKERS)}
    lost = next(pid for pid, worker in running.items() if worker == 1)
    deadline = time.monotonic() + PATIENCE_S
    codes: dict[int, int] = {}
    while running and time.monotonic() < deadline:
        for pid in [*running]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
                if pid == lost:
                    time.sleep(0.5)  # the others go on
                    os.environ[JOINS] = RETURNED
                    running[start(1)] = 1
                    del os.environ[JOINS]
        time.sleep(0.01)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    killed = int((folder / "killed").read_text()) if (folder / "killed").exists() else None
    left = [worker for worker in range(NUM_WORKERS) if worker != killed]
    paths = [folder / f"{worker}.json" for worker in left]
    ends = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    logs = {path.name: path.read_text()[-1500:] for path in folder.glob("*.log")}
    shutil.rmtree(folder)
    return {
        "story": name,
        "hung": sorted(running.values()),
        "codes": [codes.get(worker) for worker in left],
        "killed": killed,
        "left": left,
        "members": ends[0] and ends[0][0],
        "ends": len({json.dumps(end) for end in ends}),
        "logs": logs,
    }


def main() -> None:
    """Run all stories, one after the other."""
    torch.optim.SGD(nn.Linear(1, 1).parameters())  # triggers imports, once before the forks
    gc.freeze()  # else every fork collects the parent's garbage when it ends
    for name in sys.argv[1:] or STORIES:
        holder_reads, holder_writes = os.pipe()
        holder = fork(Path(os.devnull), partial(hold_store, holder_writes))
        port = int.from_bytes(os.read(holder_reads, 4), "little")
        print(json.dumps(tell(name, port)), flush=True)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def hold_store(told: int) -> None:
    """Hold a store until killed; write its port to a pipe."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(told, store.port.to_bytes(4, "little"))
    time.sleep(600)


if __name__ == "__main__":
    main()
