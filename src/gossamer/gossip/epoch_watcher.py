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

_LOOK_S = 0.05
"""How often a worker looks for a log, at least; longer where there are many."""

_LOOKS_PER_S = 1000
"""How often all workers together look, at most."""

_LOOKS_PER_JOIN = 4
"""A look for those who ask comes once in so many for a log."""

_ALARM = "other workers have lost one or let one in, and agree on who goes on"


@final
class EpochWatcher:
    """Looks for a log of the epoch, and for those who ask to join; says that this worker is there.

    Args:
        log: what members write.
        member: what this worker is called.
        answer_s: how long it may say nothing.
    """

    def __init__(self, log: EpochLog, member: int, answer_s: float) -> None:
        self._log = log
        self._member = member
        self._answer_s = answer_s
        self._ended = threading.Event()
        self._on_alarm: Callable[[str], None] = lambda reason: None
        self._announced = self._arrived = self._asked = -1
        self._pause_s = _LOOK_S
        self._thread = threading.Thread(target=self._watch, name="gossamer-members", daemon=True)

    def watch(self, on_alarm: Callable[[str], None], num_members: int) -> None:
        """Begin to look for an alarm, from a thread, and to answer it.

        Args:
            on_alarm: called on that thread with what others have seen; it must ``announce``.
            num_members: how many look.
        """
        self._on_alarm = on_alarm
        if not self._thread.is_alive():
            self._pause_s = max(_LOOK_S, num_members / _LOOKS_PER_S)
            self._thread.start()

    def ignore_alarms(self) -> None:
        """Tell nobody of an alarm until ``watch`` is called again."""
        self._on_alarm = lambda reason: None

    def announce(self, epoch: int) -> None:
        """Say that this worker is there, though the epoch has failed."""
        self._announced = max(self._announced, epoch)
        with contextlib.suppress(RuntimeError):
            self._log.append("log", epoch, alive=self._member)

    def note_arrival(self) -> None:
        """Stop saying so: this worker asks for the next epoch itself."""
        self._arrived = self._log.epoch

    @property
    def is_asked(self) -> bool:
        """Whether a worker asks to join, so that the next step should end the epoch."""
        return self._asked == self._log.epoch

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _watch(self) -> None:
        said_at = 0.0
        num_looks = 0
        while not self._ended.wait(self._pause_s):
            epoch = self._log.epoch
            if epoch == self._announced and self._arrived < epoch:
                # Its other threads may compute or wait for long; a word now and then says that it
                # is there, and none that it is not.
                if time.monotonic() - said_at > self._answer_s / 4:
                    said_at = time.monotonic()
                    self.announce(epoch)
            elif self._announced < epoch:
                # Whoever comes to agree will say that the store is gone, if it is.
                with contextlib.suppress(RuntimeError):
                    num_looks += 1
                    if self._log.has("log", epoch):
                        said_at = time.monotonic()
                        self._on_alarm(_ALARM)
                    elif num_looks % _LOOKS_PER_JOIN == 0 and self._asked < epoch:
                        self._look_for_joiners(epoch)

    def _look_for_joiners(self, epoch: int) -> None:
        if self._log.has("asked", epoch):
            self._log.mark("seen", epoch)
            self._asked = epoch
