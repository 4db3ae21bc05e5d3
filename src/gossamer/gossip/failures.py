"""Where this rank is, who is told when that lasts too long, and the error of what failed first.

Nothing here costs anything while training goes well. ``notices`` is what ranks tell each other,
``causes`` how the one that stopped first is found among it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
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
"""After how long a blocked rank posts a notice: less than a failing one looks for it."""

_WARN_S = 10.0
"""After how long a blocked rank logs a warning; again after twice as long, and so on."""

_UNKNOWN = sys.maxsize

_MOST_ASKED = 4
"""Of how many peers a blocked rank reads what they show."""


class ExchangeError(RuntimeError):
    """An exchange did not complete: a peer is late, gone, or out of step.

    Args:
        message: what this rank waited for, and the cause.
        culprit: the rank that stopped first, where that is known.
        lost: whether a wait failed, and not what ranks compared: others can go on without a peer.
        timed_out: whether it failed only because it took too long.
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
    """Knows what this rank waits for; turns a wait that fails into an error with its cause.

    Args:
        board: what ranks tell each other.
        announce: tells others of a failure at once, in place of a search for its cause; survivors
            that go on learn who is gone when they agree on members.
        heard: returns the ranks that have done so.
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
        """What lets go of connections after that, so that peers need not wait to see a failure."""
        self.closed_peers: set[int] = set()
        """Ranks whose ends of connections had closed by then."""
        # - Where this rank is
        self._place = Notice(rank=board.rank, step=0, what="")
        self._awaited: tuple[str, tuple[int, ...]] = ("", ())
        self._times_out_at = 0.0
        self._blocked_since: float | None = None
        # - Once something went wrong
        self._lock = threading.Lock()
        self._failure: ExchangeError | None = None
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="gossamer-watch", daemon=True)

    # - Where this rank is

    @property
    def survives(self) -> bool:
        """Whether training goes on after a failure."""
        return self._announce is not None

    @property
    def timeout(self) -> timedelta:
        """How long a message may take from when it is begun."""
        return self.board.timeout

    def at(self, step: int, round: str) -> None:
        """Note the step, and the digest of the round that it mixes with."""
        self._place = replace(self._place, step=step, round=round)

    @contextlib.contextmanager
    def calling(self, call: str) -> Generator[None]:
        """Note a collective call, which fails where a rank makes it alone."""
        self._place = replace(self._place, call=call, call_number=self._place.call_number + 1)
        with contextlib.suppress(RuntimeError):  # a store that is gone stops no healthy ranks
            self.board.post_call(self._place)
        try:
            yield
        finally:
            self._place = replace(self._place, call="")

    def has_made_all_calls(self) -> bool:
        """Return whether no other rank is in a collective call that this one has not come to."""
        ranks = range(self.board.size)
        latest = self.board.ask(lambda: max(map(self.board.call_number, ranks)), _UNKNOWN)
        return latest <= self._place.call_number

    def awaits(self, what: str, peers: tuple[int, ...]) -> None:
        """Note what is waited for next, on any thread, and who could end that wait."""
        self._awaited = what, peers
        self._times_out_at = time.monotonic() + self.timeout.total_seconds()

    @property
    def seconds_left(self) -> float:
        """How long the wait that was noted last may still take."""
        return self._times_out_at - time.monotonic()

    @contextlib.contextmanager
    def blocked(self) -> Generator[None]:
        """Note that training stands still in the meantime; a thread tells others if it is long."""
        outer, self._blocked_since = self._blocked_since, self._blocked_since or time.monotonic()
        try:
            yield
        finally:
            self._blocked_since = outer

    def watch(self) -> None:
        """Begin to tell the others when this rank is blocked for long, from a thread."""
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
            # Whoever fails will say that the store is gone, if it is.
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
        """Say what to do where this rank, or one that it waits for, is in a call by itself."""
        calls = [notice]
        with contextlib.suppress(RuntimeError):
            calls += filter(None, map(self.board.notice_of, notice.peers[:_MOST_ASKED]))
        for each in calls:
            if each.call:
                where = "" if each is notice else f"; rank {each.rank} is in {each.call}"
                return f"{where}; {COLLECTIVE_ADVICE}"
        return ""

    def end(self) -> None:
        """End all threads, where the store lets them."""
        self._ended.set()
        if self._watcher.is_alive():
            self._watcher.join(self.board.search_s)
        self.board.end()

    # - What failed

    @property
    def broken(self) -> bool:
        """Whether something failed: nothing that was sent or received may be used any more."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise what failed first, if anything did."""
        if self._failure is not None:
            with self._lock:  # until connections are let go of, which shows whose are closed
                raise self._failure

    def failure(self, what: str, peers: tuple[int, ...], error: RuntimeError) -> ExchangeError:
        """Return the error to raise where a wait failed.

        The first one stays: what fails after it fails because of it.
        """
        with self._lock:
            if self._failure is None:
                if self._ended.is_set():  # nobody asks any more, and threads must come to an end
                    return ExchangeError(f"rank {self.board.rank} has ended its gossip")
                self._ended.set()  # the watcher must not overwrite the last notice
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
                self._tell()
            return self._failure

    def alarm(self, reason: str) -> None:
        """Let every call from now on raise that another rank has lost one; from any thread."""
        with self._lock:
            if self._failure is None and not self._ended.is_set():
                self._ended.set()
                self._failure = ExchangeError(reason, lost=True)
                self._tell()

    def _tell(self) -> None:
        """Let those who wait for this rank know, whatever its other threads wait for themselves."""
        if self._announce is not None:
            self._announce()  # first: who lets go of connections and says nothing is gone
            self.break_off()

    def difference(self, others: Sequence[int], message: str) -> ExchangeError:
        """Return the error to raise where other ranks have sent something else."""
        with self._lock:
            if self._failure is None:
                self._ended.set()
                culprit = others[0] if len(others) == 1 else None
                self._failure = ExchangeError(message, culprit)
            return self._failure

    def give_up(self, error: Exception) -> None:
        """Tell the others why this rank stops; from now on all calls raise that."""
        self.leave(f"raised {describe(error)}")
        with self._lock:
            self._failure = self._failure or ExchangeError(str(error), self.board.rank)

    def calls_of(self, ranks: Sequence[int]) -> str:
        """Return which calls other ranks have made last, in words.

        They may be over: what ranks gather at every step is not noted, for that would cost time.
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
        """Tell the others why this rank ends before they do.

        Args:
            reason: what it did.
            ended: whether in order, with all its steps taken.
        """
        self.end()
        if self._failure is None:
            notice = Notice(
                rank=self.board.rank, step=self._place.step, what=reason, final=True, ended=ended
            )
            self.board.ask(lambda: self.board.post(notice), None)

    @contextlib.contextmanager
    def leaving_on_error(self) -> Generator[None]:
        """Tell the others about an exception that passes through."""
        try:
            yield
        except BaseException as error:
            self.leave(f"raised {describe(error)}")
            raise
