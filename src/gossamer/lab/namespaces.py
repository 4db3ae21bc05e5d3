"""The network namespaces of labs: their names, owners, processes, and removal.

A name contains the owner's process id and start time, because process ids are reused: that is how a
later lab tells the leftovers of a dead one from the namespaces of a running one. Namespaces without
such a name are never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from gossamer.errors import UserError
from gossamer.lab.iproute import run

FILES = Path("/etc/netns")
"""Where `ip netns exec` finds the files that it mounts over those of /etc."""

_NETNS = Path("/run/netns")
_NAME = re.compile(r"(gossamer-(\d+)-(\d+)-\d+)\.(switch|host\d+)")
_KILL_TIMEOUT_S = 5.0
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()
T = TypeVar("T")


def new_lab() -> str:
    """Return an id for a lab of this process: the prefix of its namespaces' names."""
    return f"gossamer-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"


def living_labs() -> list[str]:
    """Return the ids of the labs whose owner is running."""
    return sorted({lab for lab, alive in _labs() if alive})


def sweep() -> None:
    """Remove the leftovers of labs whose owner is dead; running ones are not touched."""
    for lab in sorted({lab for lab, alive in _labs() if not alive}):
        remove(lab)


def _labs() -> Iterator[tuple[str, bool]]:
    names = [path.name for path in itertools.chain(_NETNS.glob("*"), FILES.glob("*"))]
    for match in filter(None, map(_NAME.fullmatch, names)):
        yield match[1], _start_time(int(match[2])) == match[3]


def _start_time(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # Field 22, counted after the command's name, which may contain spaces and brackets.
    return stat.rpartition(")")[2].split()[19]


def remove(lab: str) -> None:
    """Kill every process in the namespaces of a lab, then remove the namespaces and their files."""
    namespaces = [path for path in _NETNS.glob(f"{lab}.*") if _NAME.fullmatch(path.name)]
    _end_processes(namespaces)
    for path in namespaces:
        try:
            run("ip", "netns", "delete", path.name)
        except UserError:
            # Already gone: two labs that start together may clean up after the same dead one.
            if path.exists():
                raise
    for folder in FILES.glob(f"{lab}.*"):
        shutil.rmtree(folder, ignore_errors=True)


def _end_processes(namespaces: Sequence[Path]) -> None:
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while pids := _pids_inside(namespaces):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_KILL_TIMEOUT_S} s for processes {pids} to end by SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids_inside(namespaces: Iterable[Path]) -> list[int]:
    inside = {_identity(path) for path in namespaces} - {None}
    pids = filter(str.isdigit, os.listdir("/proc"))
    return [int(pid) for pid in pids if _identity(Path("/proc", pid, "ns/net")) in inside]


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what identifies a namespace; None if it is gone or may not be read."""
    try:
        status = path.stat()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return status.st_dev, status.st_ino


def run_inside(namespace: str, function: Callable[[], T]) -> T:
    """Call a function inside a namespace; sockets that it creates stay in that namespace."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            _enter(namespace)
            results.append(function())
        except BaseException as error:
            errors.append(error)

    # In its own thread: setns moves the calling thread, which must not go on to run other code.
    thread = threading.Thread(target=call, name=f"inside-{namespace}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(_NETNS / namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(descriptor)
