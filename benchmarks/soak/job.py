"""The job of a soak: its processes, the files that they write, and the resources that they use."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.soak.worker import Spec
from gossamer.files import write_atomic
from gossamer.lab import Cluster, one_switch

_RESTARTS = 1000
_PORT = 29400


class Taken(NamedTuple):
    """A step that a worker has completed."""

    at: float
    step: int
    members: tuple[int, ...]


class Use(NamedTuple):
    """The resources that a process uses at one time."""

    at: float
    rss_mb: float
    descriptors: int
    threads: int


@dataclass
class Job:
    """Workers under ``gossamer launch``, from the start to ``close``.

    Args:
        spec: of the workers.
        in_lab: whether each worker is on a host of its own, with a link that can be cut; needs
            root.
    """

    spec: Spec
    in_lab: bool = False
    uses: dict[int, list[Use]] = field(default_factory=dict[int, list[Use]])
    """By process: workers, and supervisors."""

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gossamer-soak-"))
        (self.folder / "spec.json").write_text(json.dumps(asdict(self.spec)))
        worker = [sys.executable, "-m", "benchmarks.soak.worker", str(self.folder)]
        verb = [sys.executable, "-m", "gossamer", "launch", "--restarts", str(_RESTARTS)]
        self.lab: Cluster | None = None
        self._log = (self.folder / "log").open("wb")
        self._supervisors: list[subprocess.Popen[bytes]] = []
        if self.in_lab:
            self.lab = Cluster(one_switch(self.spec.num_workers, "1gbit")).__enter__()
            store = f"{self.lab.layout.hosts[0].address}:{_PORT}"
            many = f"--workers 1 --first $RANK --total {self.spec.num_workers} --store {store}"
            line = " ".join([*verb, many, "--", *worker])
            self._hosts = self.lab.start(["sh", "-c", f"exec {line}"], sink=self._write)
        else:
            several = ["--workers", str(self.spec.num_workers), "--", *worker]
            self._supervisors.append(
                subprocess.Popen([*verb, *several], stdout=self._log, stderr=self._log)
            )

    def _write(self, host: str, line: str) -> None:
        self._log.write(f"[{host}] {line}\n".encode())
        self._log.flush()

    # - What workers write

    def taken(self, worker: int, last_bytes: int = 1 << 62) -> list[Taken]:
        """Return the steps that a worker has completed so far, in all its processes.

        Args:
            worker: its number.
            last_bytes: how much of its file is read, from the end.
        """
        path = self.folder / f"{worker}.steps"
        if not path.exists():
            return []
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(size - last_bytes, 0))
            lines = file.read().decode().split("\n")[bool(start) : -1]
        fields = map(str.split, lines)
        return [Taken(float(a), int(b), tuple(map(int, c.split(",")))) for a, b, c in fields]

    def last(self, worker: int) -> Taken | None:
        """Return the last step that a worker has completed."""
        return next(reversed(self.taken(worker, 500)), None)

    def pid(self, worker: int) -> int:
        """Return the process id of a worker; 0 before its first process."""
        path = self.folder / f"{worker}.pid"
        return int(path.read_text()) if path.exists() else 0

    def log(self) -> str:
        """Return the output of all processes."""
        return (self.folder / "log").read_text(errors="replace")

    def ends(self) -> dict[int, dict[str, Any]]:
        """Return the results that workers wrote at their end."""
        paths = {worker: self.folder / f"{worker}.json" for worker in range(self.spec.num_workers)}
        return {w: json.loads(path.read_text()) for w, path in paths.items() if path.exists()}

    # - Control

    def signal(self, worker: int, number: signal.Signals) -> float:
        """Send a signal to a worker's process; return the time."""
        now = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(worker), number)
        return now

    def finish(self, ahead: int = 50) -> int:
        """Let all workers end at a step a little ahead of the fastest; return that step."""
        lasts = filter(None, map(self.last, range(self.spec.num_workers)))
        until = max(taken.step for taken in lasts) + ahead
        write_atomic(self.folder / "until", lambda aside: aside.write_text(str(until)))
        return until

    # - Waiting

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition, and sample resources meanwhile; return False if time runs out."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.look()
            time.sleep(0.05)
        return True

    def all_together(self, since: float = 0.0) -> bool:
        """Return whether the last step of every worker was with all members, and after a moment."""
        lasts = [self.last(worker) for worker in range(self.spec.num_workers)]
        num = self.spec.num_workers
        return all(last and last.at > since and len(last.members) == num for last in lasts)

    def has_ended(self) -> bool:
        """Return whether all workers have finished."""
        return len(self.ends()) == self.spec.num_workers

    def look(self) -> None:
        """Sample the resources of each process, every other second."""
        pids = [supervisor.pid for supervisor in self._supervisors]
        pids += [self.pid(worker) for worker in range(self.spec.num_workers)]
        for pid in filter(None, pids):
            uses = self.uses.setdefault(pid, [])
            if not uses or time.time() - uses[-1].at > 2:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError, StopIteration):
                    uses.append(_use_of(pid))

    @property
    def supervisor(self) -> int | None:
        """The process id of the supervisor, if there is one for all workers."""
        return self._supervisors[0].pid if self._supervisors else None

    def close(self) -> None:
        """End all processes, and delete all files."""
        for supervisor in self._supervisors:
            supervisor.terminate()
            supervisor.wait()
        if self.lab is not None:
            self.lab.__exit__()
        self._log.close()
        shutil.rmtree(self.folder)


def _use_of(pid: int) -> Use:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    if "VmRSS" not in fields:  # a zombie
        raise ProcessLookupError(pid)
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    rss_mb = int(fields["VmRSS"].split()[0]) / 1024
    return Use(time.time(), rss_mb, descriptors, int(fields["Threads"]))


class Trend(NamedTuple):
    """How the use of a resource changed."""

    first: float
    last: float
    per_hour: float
    """The slope of a least-squares line."""


def trends(uses: Sequence[Use], since: float) -> dict[str, Trend]:
    """Return the trends of memory, file descriptors and threads since a moment."""
    late = [use for use in uses if use.at >= since]
    if len(late) < 3:
        return {}
    hours = (np.array([use.at for use in late]) - late[0].at) / 3600
    found: dict[str, Trend] = {}
    for name in ("rss_mb", "descriptors", "threads"):
        values = np.array([getattr(use, name) for use in late], dtype=float)
        slope = float(np.polyfit(hours, values, 1)[0])
        found[name] = Trend(float(values[0]), float(values[-1]), slope)
    return found
