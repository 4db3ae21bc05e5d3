"""Training that survives faults, in real processes with real signals; how each worker fares.

A *scene* is a run of a few workers, with the store in a process of its own, that lasts for a given
number of steps while a fault happens to some of the workers. Every worker writes the time of each
completed step and the number of members to a file; all figures are computed from these files.
``python -m benchmarks.faults --continue`` prints them, and ``python -m benchmarks.recovery`` uses
the same scenes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import UserError
from gossamer.files import write_atomic
from gossamer.gossip import Gossip, decentralize
from gossamer.lab import Cluster, parse_layout
from gossamer.lab.iproute import check_machine
from gossamer.lab.namespaces import run_inside
from gossamer.lab.network import INTERFACE
from gossamer.launch import hold_store

FAULT_STEP = 20


class Taken(NamedTuple):
    """A step that a worker has completed."""

    at: float
    step: int
    num_workers: int


class Place(NamedTuple):
    """The lab that a scene runs in, which needs root; its links can be cut."""

    layout: str
    hosts: tuple[int, ...]
    """The host of each worker."""

    store: int
    """The host of the store."""


@dataclass(frozen=True)
class Scene:
    """A run with a fault."""

    num_workers: int = 4
    topology: str = "one_peer_exponential"
    algorithm: str = "awc"
    control: str = "plain"
    num_steps: int = 100
    pace_s: float = 0.01
    """How long a step computes."""

    timeout_s: float = 5.0
    average_every: int = 0
    """Steps from one evaluation of the average, on all workers, to the next; 0 for none."""

    actor: int = 2
    """The worker that runs ``act``."""

    act: Callable[[Gossip], object] | None = None
    """Called before step ``FAULT_STEP``."""

    exit_s: float = 0.0
    """How long the process of the actor takes to end."""

    place: Place | None = None


@dataclass
class Running:
    """The processes of a scene."""

    scene: Scene
    folder: Path
    holder: int
    workers: dict[int, int]
    """Process ids by worker."""

    lab: Cluster | None = None
    codes: dict[int, int] = field(default_factory=dict[int, int])

    def kill(self, worker: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to a worker; return the time."""
        now = time.time()
        os.kill(self.workers[worker], number)
        return now

    def taken(self, worker: int) -> list[Taken]:
        """Return the steps that a worker has completed so far."""
        path = self.folder / f"{worker}.steps"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [Taken(float(a), int(b), int(c)) for a, b, c in map(str.split, lines)]

    def log_of(self, worker: int) -> str:
        """Return a worker's output so far."""
        return (self.folder / f"{worker}.log").read_text(errors="replace")

    def wait_for_step(self, step: int, worker: int) -> None:
        """Wait until a worker has completed a step."""
        deadline = time.monotonic() + 60
        while not (taken := self.taken(worker)) or taken[-1].step < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"worker {worker} did not come to step {step}")
            time.sleep(0.01)

    def wait(self, patience_s: float) -> dict[int, int]:
        """Wait for all workers, kill those that do not end, and return exit codes."""
        deadline = time.monotonic() + patience_s
        while len(self.codes) < len(self.workers):
            for worker, pid in self.workers.items():
                if worker not in self.codes:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        self.codes[worker] = os.waitstatus_to_exitcode(status)
                    elif time.monotonic() > deadline:
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        return self.codes

    def close(self) -> None:
        """Kill the store's process, and delete all files."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.holder, signal.SIGKILL)
        os.waitpid(self.holder, 0)
        shutil.rmtree(self.folder)
        if self.lab is not None:
            self.lab.__exit__()


def start(scene: Scene) -> Running:
    """Start the workers of a scene."""
    # Not a `with`: a forked process unwinds through this frame, and must not delete anything.
    folder = Path(tempfile.mkdtemp(prefix="gossamer-survival-"))
    place, lab, address = scene.place, None, "127.0.0.1"
    if place is not None:
        lab = Cluster(parse_layout(place.layout)).__enter__()
        address = lab.layout.hosts[place.store].address

    def fork_on(body: Callable[[], None], log: str, host: int) -> int:
        if lab is None:
            return fork(body, folder / log)
        namespace = f"{lab.id}.{lab.layout.hosts[host].name}"
        return fork(lambda: run_inside(namespace, body), folder / log)

    hosts = range(scene.num_workers) if place is None else place.hosts
    store_host = 0 if place is None else place.store
    holder = fork_on(lambda: _hold_store(folder, address), "store.log", store_host)
    workers = {
        rank: fork_on(lambda rank=rank: _work(scene, rank, folder, address), f"{rank}.log", host)
        for rank, host in enumerate(hosts)
    }
    return Running(scene, folder, holder, workers, lab)


def seconds_until_step(running: Running, worker: int, at: float, most_workers: int) -> float:
    """Return the time from a moment to a worker's next step with at most so many members."""
    steps = (taken for taken in running.taken(worker) if taken.at > at)
    return next((t.at - at for t in steps if t.num_workers <= most_workers), float("inf"))


def longest_pause(running: Running, worker: int, at: float) -> float:
    """Return the longest time between two steps of a worker, of those that end after a moment."""
    times = [taken.at for taken in running.taken(worker)]
    return max(b - a for a, b in pairwise(times) if b > at)


def fork(body: Callable[[], None], log: Path) -> int:
    """Run a function in a forked process, which ends as a script does."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, sys.stderr.fileno())
        os.dup2(file, sys.stdout.fileno())
        body()
        sys.exit()
    return pid


def _hold_store(folder: Path, address: str) -> None:
    with hold_store(address) as port:
        write_atomic(folder / "port", lambda aside: aside.write_text(str(port)))
        time.sleep(3600)


def _join_store(folder: Path, address: str) -> TCPStore:
    deadline = time.monotonic() + 30
    while not (folder / "port").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return TCPStore(address, int((folder / "port").read_text()), is_master=False)


def _work(scene: Scene, rank: int, folder: Path, address: str) -> None:
    torch.set_num_threads(1)
    if scene.place is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    store = _join_store(folder, address)
    # Many processes on few processors start slowly, and the timeout is for training.
    store.set(f"started/{rank}", "")
    store.wait([f"started/{other}" for other in range(scene.num_workers)], timedelta(seconds=60))
    group = dist.ProcessGroup(store, rank, scene.num_workers)
    if rank == scene.actor and scene.exit_s:
        atexit.register(time.sleep, scene.exit_s)  # atexit runs it after what is registered later
    torch.manual_seed(rank)
    model = nn.Linear(200, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gossip = decentralize(
        model,
        optimizer,
        scene.topology,
        process_group=group,
        algorithm=scene.algorithm,
        control=scene.control,
        on_failure="continue",
        timeout=timedelta(seconds=scene.timeout_s),
    )
    with (folder / f"{rank}.steps").open("w", buffering=1) as file:
        while gossip.num_steps < scene.num_steps:
            time.sleep(scene.pace_s)
            if scene.act is not None and rank == scene.actor and gossip.num_steps == FAULT_STEP:
                scene.act(gossip)
                if scene.act == Gossip.close:
                    return
            optimizer.zero_grad()
            model(torch.randn(8, 200)).square().mean().backward()
            optimizer.step()
            file.write(f"{time.time()} {gossip.num_steps} {gossip.num_workers}\n")
            if scene.average_every and gossip.num_steps % scene.average_every == 0:
                with gossip.averaged():
                    pass
    gossip.finalize()
    answer: dict[str, Any] = {
        "members": gossip.members,
        "norm": float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm()),
        "failures": gossip.stats().failures,
        "recovery_s": gossip.stats().recovery_s,
    }
    (folder / f"{rank}.json").write_text(json.dumps(answer))


def answers(running: Running, workers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the results that workers wrote at their end."""
    paths = {worker: running.folder / f"{worker}.json" for worker in workers}
    return {w: json.loads(path.read_text()) for w, path in paths.items() if path.exists()}


@dataclass(frozen=True)
class Fault:
    """A scene, its fault, and the expected outcome."""

    scene: Scene
    survivors: tuple[int, ...]
    happen: Callable[[Running], float]
    """Causes the fault; returns the time."""

    later: Callable[[Running], object] = lambda running: None
    """Called after the fault; waits itself for survivors to continue."""

    words: str = ""
    """What the output of workers that do not survive must contain."""


def _kill(*workers: int, pause_s: float = 0.0) -> Callable[[Running], float]:
    def happen(running: Running) -> float:
        running.wait_for_step(FAULT_STEP, 3)
        for worker in workers[:-1]:
            running.kill(worker)
            time.sleep(pause_s)
        return running.kill(workers[-1])

    return happen


def _stall(seconds: float = 0.0) -> Callable[[Running], float]:
    def happen(running: Running) -> float:
        running.wait_for_step(FAULT_STEP, 3)
        at = running.kill(2, signal.SIGSTOP)
        if seconds:
            time.sleep(seconds)
            running.kill(2, signal.SIGCONT)
        return at

    return happen


def _cut(link: str, seconds: float = 0.0) -> Callable[[Running], float]:
    def happen(running: Running) -> float:
        running.wait_for_step(FAULT_STEP, 3)
        assert running.lab is not None
        now = time.time()
        running.lab.cut(link)
        if seconds:
            time.sleep(seconds)
            running.lab.restore(link)
        return now

    return happen


def _watch(running: Running) -> float:
    running.wait_for_step(FAULT_STEP, 3)
    return running.taken(3)[FAULT_STEP - 1].at


def _kill_store(running: Running) -> float:
    running.wait_for_step(FAULT_STEP, 3)
    os.kill(running.holder, signal.SIGKILL)
    return running.kill(2)


def _resume(running: Running) -> None:
    running.wait_for_step(running.scene.num_steps, 3)
    running.kill(2, signal.SIGCONT)


def _raise(gossip: Gossip) -> None:
    raise ValueError("bad sample in the data")


def _average_alone(gossip: Gossip) -> None:
    with gossip.averaged():
        pass


_OTHERS = (0, 1, 3)
_EACH_ALONE = Place("5x1:1gbit/1gbit", (0, 1, 2, 3), 4)
_TWO_NODES = Place("2x3:1gbit/1gbit", (0, 1, 3, 4), 2)

FAULTS: dict[str, Fault] = {
    "killed": Fault(Scene(topology="ring"), _OTHERS, _kill(2)),
    "killed, with averages": Fault(Scene(average_every=3), _OTHERS, _kill(2)),
    "killed in an all-reduce": Fault(Scene(topology="complete"), _OTHERS, _kill(2)),
    "killed under control": Fault(Scene(control="constant(c=0.25)"), _OTHERS, _kill(2)),
    "killed under tracking": Fault(Scene(algorithm="gradient_tracking"), _OTHERS, _kill(2)),
    "the first killed": Fault(Scene(), (1, 2, 3), _kill(0)),
    "two neighbours killed": Fault(Scene(6, "ring"), (0, 3, 4, 5), _kill(1, 2)),
    "one of 16 killed": Fault(
        Scene(16, num_steps=60), tuple(w for w in range(16) if w != 2), _kill(2)
    ),
    "half killed": Fault(Scene(8), (0, 3, 5, 6), _kill(1, 2, 4, 7)),
    "all but one killed": Fault(Scene(), (3,), _kill(0, 1, 2)),
    "killed during recovery": Fault(Scene(5), (0, 3, 4), _kill(1, 2, pause_s=0.28)),
    "a torus of 6 becomes one of 5": Fault(Scene(6, "torus"), (0, 1, 3, 4, 5), _kill(2)),
    "stalled": Fault(Scene(), _OTHERS, _stall(), _resume, "the others went on without worker 2"),
    "stalled for a moment": Fault(Scene(), (0, 1, 2, 3), _stall(0.3)),
    "raises": Fault(Scene(act=_raise, exit_s=3.0), _OTHERS, _watch, words="bad sample"),
    "ends early": Fault(Scene(act=Gossip.close), _OTHERS, _watch),
    "averages alone": Fault(
        Scene(act=_average_alone, topology="ring"),
        (),
        _watch,
        words="all workers must make the same calls",
    ),
    "killed with the store": Fault(Scene(), (), _kill_store, words="must reach the store"),
    "a link cut": Fault(
        Scene(place=_EACH_ALONE), _OTHERS, _cut("host2"), words="must reach the store"
    ),
    "half cut off": Fault(
        Scene(place=_TWO_NODES), (0, 1), _cut("node1"), words="must reach the store"
    ),
    "a link cut for a moment": Fault(
        Scene(place=_EACH_ALONE), (0, 1, 2, 3), _cut("host2", seconds=0.3)
    ),
}


def warm_up() -> None:
    """Import and freeze in the parent what all forks share."""
    torch.set_num_threads(1)
    torch.optim.SGD(nn.Linear(1, 1).parameters())  # triggers imports, once before the forks
    gc.freeze()  # else every fork collects the parent's garbage when it ends


def playable() -> list[str]:
    """Return the faults that this machine can run: some cut a link in a lab."""
    try:
        check_machine()
    except UserError as error:
        print(f"without a lab: {error}", file=sys.stderr)
        return [name for name, fault in FAULTS.items() if fault.scene.place is None]
    return [*FAULTS]


def play(names: Sequence[str], timeout_s: float, together: int) -> Iterator[dict[str, Any]]:
    """Yield a row per fault; several run at a time, as they mostly wait."""
    warm_up()
    for batch in (names[i : i + together] for i in range(0, len(names), together)):
        faults = {name: FAULTS[name] for name in batch}
        scenes = {name: replace(f.scene, timeout_s=timeout_s) for name, f in faults.items()}
        running = {name: start(scene) for name, scene in scenes.items()}  # forks, before threads
        with ThreadPoolExecutor(together) as pool:
            outcomes = pool.map(_outcome, faults.values(), running.values())
            for name, outcome in zip(batch, outcomes, strict=True):
                yield {"fault": name, **outcome}


def _outcome(fault: Fault, running: Running) -> dict[str, Any]:
    at = 0.0
    with contextlib.suppress(TimeoutError):
        at = fault.happen(running)
        fault.later(running)
    codes = running.wait(6 * running.scene.timeout_s + 15)
    ends = answers(running, fault.survivors)
    num_left = len(fault.survivors)
    seconds = [
        seconds_until_step(running, w, at, num_left)
        if num_left < running.scene.num_workers
        else longest_pause(running, w, at)
        for w in fault.survivors
    ]
    others = [w for w in codes if w not in fault.survivors and codes[w] != -signal.SIGKILL]
    row: dict[str, Any] = {
        "survivors": num_left,
        "seconds": max(seconds, default=0.0),
        "steps_lost": sum(running.scene.num_steps - running.taken(w)[-1].step for w in ends),
        "went_on": [*ends] == [*fault.survivors]
        and all(codes[w] == 0 and end["members"] == [*fault.survivors] for w, end in ends.items()),
        "one_model": len({end["norm"] for end in ends.values()}) <= 1,
        "said": all(
            fault.words in running.log_of(w)
            and "Exception ignored" not in running.log_of(w)
            and codes[w] in (0, 1)
            for w in others
        ),
    }
    if not (row["went_on"] and row["said"]):
        row["logs"] = {w: f"{codes[w]}: {running.log_of(w)[-1500:]}" for w in codes}
    running.close()
    return row
