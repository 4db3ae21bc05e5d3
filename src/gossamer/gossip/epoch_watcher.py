"""The thread that polls an epoch's log and answers for this worker while it computes.

Only this thread may query the store without a deadline (``EpochLog.has`` and ``mark``): if the
store is unreachable such a query never returns, and nothing may wait for this thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import final

from gossamer.gossip.epoch_log import EpochLog

_POLL_S = 0.05
"""Between two polls of the log, at least; longer where there are many workers."""

_POLLS_PER_S = 1000
"""Of all workers together, at most, so that the store is not flooded."""

_POLLS_PER_JOIN = 4
"""Polls of the log from one poll for requests to join to the next."""

_ALARM = "other workers have lost or admitted a member, and agree on the next epoch"


@final
class EpochWatcher:
    """Polls for a log of the epoch and for requests to join; repeats that this worker is alive.

    Args:
        log: the records of epochs.
        member: this worker's number.
        answer_s: how long a member may be silent.
    """

    def __init__(self, log: EpochLog, member: int, answer_s: float) -> None:
        self._log = log
        self._member = member
        self._answer_s = answer_s
        self._ended = threading.Event()
        self._on_alarm: Callable[[str], None] = lambda reason: None
        # The last epoch whose failure this worker announced, whose successor it asked for, and
        # in which it saw a request to join.
        self._announced = self._arrived = self._requested = -1
        self._pause_s = _POLL_S
        self._thread = threading.Thread(target=self._watch, name="gossamer-members", daemon=True)

    def watch(self, on_alarm: Callable[[str], None], num_members: int) -> None:
        """Start to poll, or report alarms to another listener from now on.

        Args:
            on_alarm: called on the polling thread when another member has opened the log; it must
                ``announce``.
            num_members: how many workers poll the store.
        """
        self._on_alarm = on_alarm
        if not self._thread.is_alive():
            self._pause_s = max(_POLL_S, num_members / _POLLS_PER_S)
            self._thread.start()

    def ignore_alarms(self) -> None:
        """Report no alarm until ``watch`` is called again."""
        self._on_alarm = lambda reason: None

    def announce(self, epoch: int) -> None:
        """Write that the epoch has failed, and that this worker is alive."""
        self._announced = max(self._announced, epoch)
        with contextlib.suppress(RuntimeError):
            self._log.append("log", epoch, alive=self._member)

    def note_arrival(self) -> None:
        """Stop repeating that this worker is alive: its arrival says so."""
        self._arrived = self._log.epoch

    @property
    def has_request(self) -> bool:
        """Whether a worker asks to join the current epoch."""
        return self._requested == self._log.epoch

    def end(self) -> None:
        """Stop polling."""
        self._ended.set()

    def _watch(self) -> None:
        announced_at = 0.0
        num_polls = 0
        while not self._ended.wait(self._pause_s):
            epoch = self._log.epoch
            if epoch == self._announced and self._arrived < epoch:
                # The training thread may compute or block for long before it arrives. Members that
                # are silent for answer_s count as lost, so this repeats well within that.
                if time.monotonic() - announced_at > self._answer_s / 4:
                    announced_at = time.monotonic()
                    self.announce(epoch)
            elif self._announced < epoch:
                # An unreachable store is reported by the training thread, when it needs the store.
                with contextlib.suppress(RuntimeError):
                    num_polls += 1
                    if self._log.has("log", epoch):
                        announced_at = time.monotonic()
                        self._on_alarm(_ALARM)
                    elif num_polls % _POLLS_PER_JOIN == 0 and self._requested < epoch:
                        self._poll_requests(epoch)

    def _poll_requests(self, epoch: int) -> None:
        if self._log.has("asked", epoch):
            self._log.mark("seen", epoch)
            self._requested = epoch
