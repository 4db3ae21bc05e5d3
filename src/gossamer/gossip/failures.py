"""The failure detector: it tracks what a rank waits for, and turns a failed wait into an error.

While training runs without failures it must cost nothing: no query to the store per step.
``notices`` holds what ranks post, ``causes`` the search for the rank that stopped first.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import final

from gossamer.gossip.causes import COLLECTIVE_ADVICE, find_cause
from gossamer.gossip.notices import Notice, NoticeBoard, describe, name_ranks

_log = logging.getLogger(__name__)

_BLOCKED_S = 1.0
"""After how long a blocked rank posts a notice: less than a failing rank searches for it."""

_WARN_S = 10.0
"""After how long a blocked rank logs a warning; the next ones after twice as long each."""

_MAX_PEERS_READ = 4
"""Of how many peers a blocked rank reads the notices for its warning."""


class ExchangeError(RuntimeError):
    """An exchange did not complete: a peer is late, gone, or out of step.

    Args:
        message: what this rank waited for, and the cause.
        culprit: the rank that stopped first, if known.
        lost: whether a wait failed, which others survive, and not a comparison between ranks.
        timed_out: whether the wait timed out, and no connection closed.
    """

    def __init__(
        self,
        message: str,
        culprit: int | None = None,
        *,
        lost: bool = False,
        timed_out: bool = False,
    ) -> None:
        super().__init__(message)
        self.culprit = culprit
        self.lost = lost
        self.timed_out = timed_out


@final
class FailureDetector:
    """Tracks what this rank waits for; turns a failed wait into an error that names its cause.

    Args:
        board: the notices of all ranks.
        announce: announces a failure to the others at once, instead of a search for its cause:
            survivors learn who is lost when they agree on members.
        heard: returns the ranks that have announced a failure.
    """

    def __init__(
        self,
        board: NoticeBoard,
        announce: Callable[[], None] | None = None,
        heard: Callable[[], set[int]] = set[int],
    ) -> None:
        self.board = board
        self.heard = heard
        self._announce = announce
        self.break_off: Callable[[], None] = lambda: None
        """Closes connections after the announcement, so that peers fail at once."""
        self.closed_peers: set[int] = set()
        """Ranks whose connections had closed before this rank closed its own."""
        # - What this rank does
        self._place = Notice(rank=board.rank, step=0, what="")
        self._awaited: tuple[str, tuple[int, ...]] = ("", ())
        self._times_out_at = 0.0
        self._blocked_since: float | None = None
        # - The first failure
        self._lock = threading.Lock()
        self._failure: ExchangeError | None = None
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="gossamer-watch", daemon=True)

    # - What this rank does

    @property
    def survives(self) -> bool:
        """Whether training continues after a failure."""
        return self._announce is not None

    @property
    def timeout(self) -> timedelta:
        """How long a message may take after it has been posted."""
        return self.board.timeout

    def at(self, step: int, round: str) -> None:
        """Note the current step, and the digest of its round."""
        self._place = replace(self._place, step=step, round=round)

    @contextlib.contextmanager
    def calling(self, call: str) -> Generator[None]:
        """Note that this rank is in a collective call, and post it for ranks that are not."""
        self._place = replace(self._place, call=call, call_number=self._place.call_number + 1)
        with contextlib.suppress(RuntimeError):  # healthy ranks train on without the store
            self.board.post_call(self._place.numbered_call)
        try:
            yield
        finally:
            self._place = replace(self._place, call="")

    def has_made_all_calls(self) -> bool:
        """Return whether no other rank is in a collective call that this one has yet to make."""
        numbers = self.board.ask(self.board.call_numbers, [])
        return bool(numbers) and max(numbers) <= self._place.call_number

    def awaits(self, what: str, peers: tuple[int, ...]) -> None:
        """Note the next wait, on any thread, and the ranks that can end it."""
        self._awaited = what, peers
        self._times_out_at = time.monotonic() + self.timeout.total_seconds()

    @property
    def seconds_left(self) -> float:
        """Time until the wait that was noted last times out."""
        return self._times_out_at - time.monotonic()

    @contextlib.contextmanager
    def blocked(self) -> Generator[None]:
        """Mark a block in which training waits; a thread posts a notice if it takes long."""
        outer, self._blocked_since = self._blocked_since, self._blocked_since or time.monotonic()
        try:
            yield
        finally:
            self._blocked_since = outer

    def watch(self) -> None:
        """Start the thread that posts a notice when this rank is blocked for long."""
        if self.survives:  # else nobody joins, and call_numbers() is not asked for
            self.board.post_call("")
        self._watcher.start()

    def _watch(self) -> None:
        limit = min(_BLOCKED_S, self.board.search_s / 4)
        posted: Notice | None = None
        warn_after = _WARN_S
        while not self._ended.wait(limit / 2):
            since = self._blocked_since
            blocked = 0.0 if since is None else time.monotonic() - since
            what, peers = self._awaited
            notice = replace(self._place, what=what, peers=peers) if blocked > limit else None
            # An unreachable store is reported by a rank that fails, not by one that waits.
            with contextlib.suppress(RuntimeError):
                if notice is not None and notice != posted:
                    self.board.post(notice)
                elif notice is None and posted is not None:
                    self.board.take_back()
            posted = notice
            if notice is None:
                warn_after = _WARN_S
            elif blocked > warn_after:
                warn_after *= 2
                _log.warning("%s, for %.0f s so far%s", notice, blocked, self._advice(notice))

    def _advice(self, notice: Notice) -> str:
        """Return advice if this rank, or one that it waits for, is alone in a collective call."""
        calls = [notice]
        with contextlib.suppress(RuntimeError):
            calls += filter(None, map(self.board.notice_of, notice.peers[:_MAX_PEERS_READ]))
        for each in calls:
            if each.call:
                where = "" if each is notice else f"; rank {each.rank} is in {each.call}"
                return f"{where}; {COLLECTIVE_ADVICE}"
        return ""

    def end(self) -> None:
        """End all threads, if the store answers."""
        self._ended.set()
        if self._watcher.is_alive():
            self._watcher.join(self.board.search_s)
        self.board.end()

    # - Failures

    @property
    def broken(self) -> bool:
        """Whether a wait has failed: the network must not be used any more."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the first failure, if there is one."""
        if self._failure is not None:
            with self._lock:  # until connections are closed, which fills closed_peers
                raise self._failure

    def failure(self, what: str, peers: tuple[int, ...], error: RuntimeError) -> ExchangeError:
        """Return the error to raise after a failed wait.

        It is always the first one: later failures follow from it.
        """
        with self._lock:
            if self._failure is None:
                if self._ended.is_set():  # no search any more: threads must end
                    return ExchangeError(f"rank {self.board.rank} has ended its gossip")
                self._ended.set()  # else the watcher may overwrite the final notice
                own = replace(self._place, what=what, peers=peers, final=True)
                lost = not re.search("timed? ?out", str(error), re.IGNORECASE)
                if self._announce is None:
                    reason, culprit = find_cause(self.board, own, lost=lost)
                else:
                    reason = "the connection was lost" if lost else "it took too long"
                    culprit = peers[0] if len(peers) == 1 else None
                self._failure = ExchangeError(
                    f"{own}, and failed: {reason} (timeout {self.timeout})",
                    culprit,
                    lost=True,
                    timed_out=not lost,
                )
                self._announce_failure()
            return self._failure

    def alarm(self, reason: str) -> None:
        """Fail all calls from now on, though no wait of this rank has failed; from any thread."""
        with self._lock:
            if self._failure is None and not self._ended.is_set():
                self._ended.set()
                self._failure = ExchangeError(reason, lost=True)
                self._announce_failure()

    def _announce_failure(self) -> None:
        """Free the ranks that wait for this one, whatever its own threads wait for."""
        if self._announce is not None:
            self._announce()  # first: a rank that closes connections unannounced counts as lost
            self.break_off()

    def difference(self, others: Sequence[int], message: str) -> ExchangeError:
        """Return the error to raise where other ranks sent a different value."""
        with self._lock:
            if self._failure is None:
                self._ended.set()
                culprit = others[0] if len(others) == 1 else None
                self._failure = ExchangeError(message, culprit)
            return self._failure

    def give_up(self, error: Exception) -> None:
        """Post why this rank stops; all later calls raise the same."""
        self.leave(f"raised {describe(error)}")
        with self._lock:
            self._failure = self._failure or ExchangeError(str(error), self.board.rank)

    def calls_of(self, ranks: Sequence[int]) -> str:
        """Return the last collective calls of other ranks, in words.

        A rank may be past that call: gathers in every step are not posted, to save time.
        """
        calls = self.board.ask(lambda: [self.board.call_of(rank) for rank in ranks], [])
        if not calls:
            return f"{name_ranks(ranks)} elsewhere"
        return ", ".join(
            f"rank {rank} last called {call.partition(' ')[2]}"
            if call
            else f"rank {rank} has made no collective call"
            for rank, call in zip(ranks, calls, strict=True)
        )

    def leave(self, reason: str, *, ended: bool = False) -> None:
        """Post why this rank ends before the others.

        Args:
            reason: what it did.
            ended: whether it has taken all its steps and closed its gossip.
        """
        self.end()
        if self._failure is None:
            notice = Notice(
                rank=self.board.rank, step=self._place.step, what=reason, final=True, ended=ended
            )
            self.board.ask(lambda: self.board.post(notice), None)

    @contextlib.contextmanager
    def leaving_on_error(self) -> Generator[None]:
        """Post an exception that leaves the block."""
        try:
            yield
        except BaseException as error:
            self.leave(f"raised {describe(error)}")
            raise
