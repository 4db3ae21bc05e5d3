"""One command on every host: started together, output prefixed, the first failure ends all.

Each process leads its own session, so that a signal from the terminal reaches only the lab, which
then ends the processes in order. Each has two threads: one copies its output, one waits for its
exit; the thread that called `start` owns everything else.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, final

from gossamer.errors import UserError

Sink = Callable[[str, str], None]
"""Takes a host's name and one line of its output; must be thread-safe, one thread per host."""

_TAIL_LINES = 40
_GRACE_S = 5.0
"""How long a process may take to end after SIGTERM, before SIGKILL."""

_DRAIN_S = 1.0
"""How long to wait for the last output of a process that has exited."""


class HostFailed(Exception):
    """The command failed on one host, and was ended on the others."""

    def __init__(self, host: str, code: int, output: str) -> None:
        super().__init__(f"{host} ended with exit code {code}; its last output:\n{output}")
        self.host = host
        self.code = code
        self.output = output


@final
@dataclass(frozen=True, slots=True)
class Launch:
    """What to start on one host."""

    host: str
    namespace: str
    environment: Mapping[str, str]


@final
class HostProcesses:
    """The processes of one command on several hosts.

    The thread that starts it must outlive it: processes have the parent-death signal, which the
    kernel sends when that *thread* exits. It leaves none behind after a `kill -9` of the lab.

    Args:
        command: the program and its arguments.
        launches: the hosts it runs on.
        sink: gets the lines of output.
    """

    def __init__(self, command: Sequence[str], launches: Sequence[Launch], sink: Sink) -> None:
        self._sink = sink
        self._ended: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._tails = {launch.host: deque[str](maxlen=_TAIL_LINES) for launch in launches}
        self._readers: dict[str, threading.Thread] = {}
        self._sink_error: Exception | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._running: set[str] = set()
        program = find_program(command)
        try:
            for launch in launches:
                self._start([program, *command[1:]], launch)
        except BaseException:
            self.stop()
            raise

    def _start(self, command: Sequence[str], launch: Launch) -> None:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", launch.namespace, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(launch.environment),
            start_new_session=True,
        )
        assert process.stdout is not None
        self._processes[launch.host] = process
        self._running.add(launch.host)
        reader = threading.Thread(
            target=self._copy_output, args=(launch.host, process.stdout), daemon=True
        )
        self._readers[launch.host] = reader
        reader.start()
        threading.Thread(
            target=lambda: self._ended.put((launch.host, process.wait())), daemon=True
        ).start()

    def wait(self, timeout_s: float = math.inf) -> None:
        """Return when the command has ended on every host.

        Args:
            timeout_s: how long it may take; by default there is no limit.

        Raises:
            HostFailed: it failed on a host; it has been ended on the others.
            TimeoutError: it took longer; it has been ended on all.
            Exception: what the sink raised first; later output of that host is lost.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while self._running:
                host, code = self._next_end(deadline)
                if self._sink_error is not None:  # its failure ended the command, not the host's
                    break
                if code != 0:
                    raise self._failure(host, code)
        finally:
            self.stop()
        if self._sink_error is not None:
            raise self._sink_error

    def stop(self) -> None:
        """End the command wherever it still runs: SIGTERM, then SIGKILL after a grace period."""
        # Polls the processes, not the threads that wait for them: a signal may have arrived after a
        # process was started and before its threads were.
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = [process for process in self._processes.values() if process.poll() is None]
            for process in alive:
                _signal_session(process, number)
            deadline = time.monotonic() + _GRACE_S
            for process in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        self._running.clear()
        for reader in self._readers.values():
            if reader.ident is not None:
                reader.join(_DRAIN_S)

    def _next_end(self, deadline: float) -> tuple[str, int]:
        left = deadline - time.monotonic()
        try:
            host, code = self._ended.get(timeout=None if left == math.inf else max(left, 0.0))
        except queue.Empty:
            hosts = ", ".join(sorted(self._running))
            raise TimeoutError(f"the command did not end in time on {hosts}") from None
        self._running.discard(host)
        return host, code

    def _failure(self, host: str, code: int) -> HostFailed:
        self._readers[host].join(_DRAIN_S)
        # The shell's convention for a process that was ended by a signal: 128 + its number.
        shown = 128 - code if code < 0 else code
        return HostFailed(host, shown, "\n".join(self._tails[host]))

    def _copy_output(self, host: str, stream: IO[bytes]) -> None:
        # Where our own stdout is closed (a pipe to head) theirs is closed too, and they end.
        with stream, contextlib.suppress(BrokenPipeError):
            for line in stream:
                text = line.decode(errors="replace").rstrip("\r\n")
                self._tails[host].append(text)
                try:
                    self._sink(host, text)
                except BrokenPipeError:
                    raise
                except Exception as error:  # raised in this thread it would be lost
                    self._sink_error = self._sink_error or error
                    return


def find_program(command: Sequence[str]) -> str:
    """Return the path of a command's program, or raise a UserError."""
    program = shutil.which(command[0]) if command else None
    if program is None:
        given = repr(command[0]) if command else "nothing"
        raise UserError(
            f"the command must begin with an executable program, got {given}; "
            "give its path, for example -- python train.py"
        )
    return program


def _signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
