"""What ranks tell each other through the store: where they are, and why they stopped.

The store is the side channel: it works before anything has been sent, and after a connection is
lost. Nothing here costs anything while training goes well.

Note [Finding the cause]
With Gloo a wait that times out breaks every connection of its rank, so one failure becomes many,
and the peer that an error names may be healthy. Therefore each rank posts a notice: when it fails,
when it ends, and when it has been blocked for a while. A notice names the ranks that its author
waited for. From a rank's own notice one follows these names until a rank that posted none, which is
the one that is gone or stalled, or until a notice that explains itself: an exception, an end, a
call that not all ranks made, another round at the same step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import NamedTuple, TypeVar, final

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore

_log = logging.getLogger(__name__)

_SEARCH_S = 4.0
"""How long a failing rank looks for the cause, or half its timeout. The store may not answer."""

_BLOCKED_S = 1.0
"""After how long a blocked rank posts a notice: less than a failing one looks for it."""

_WARN_S = 10.0
"""After how long a blocked rank logs a warning."""

Answer = TypeVar("Answer")


class ExchangeError(RuntimeError):
    """An exchange did not complete: a peer is late, gone, or out of step.

    Args:
        message: what this rank waited for, and the cause.
        culprit: the rank that stopped first, where that is known.
    """

    def __init__(self, message: str, culprit: int | None = None) -> None:
        super().__init__(message)
        self.culprit = culprit


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What one rank says about itself."""

    rank: int
    step: int
    what: str
    """What it waited for or did."""

    peers: tuple[int, ...] = ()
    """The ranks that could have ended the wait; none where the notice explains itself."""

    round: str = ""
    """Digest of the round that it was mixing with."""

    call: str = ""
    """The collective call that it was in."""

    call_number: int = 0
    """How many such calls it had made, this one included."""

    final: bool = False
    """Whether it will not go on, and is not only blocked."""


class _Cause(NamedTuple):
    text: str
    culprit: int | None


_NO_ANSWER = _Cause(
    "the cause is not known, because the store does not answer: the process that holds it, often "
    "rank 0, is gone or stalled",
    None,
)


@final
class Bulletin:
    """One rank's view of the notices of a group.

    Args:
        process_group: gives rank, size and store.
        timeout: how long ranks wait for each other.
    """

    def __init__(self, process_group: ProcessGroup, timeout: timedelta) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self.timeout = timeout
        self.store = _private_store(process_group)
        # - Where this rank is
        self._place = Notice(rank=self.rank, step=0, what="")
        self._awaited: tuple[str, tuple[int, ...]] = ("", ())
        self._times_out_at = 0.0
        self._blocked_since: float | None = None
        # - Once something went wrong
        self._search_s = min(_SEARCH_S, timeout.total_seconds() / 2)
        self._lock = threading.Lock()
        self._failure: ExchangeError | None = None
        self._searches: list[threading.Thread] = []
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="gossamer-watch", daemon=True)

    # - Where this rank is

    def at(self, step: int, round: str) -> None:
        """Note the step, and the digest of the round that it mixes with."""
        self._place = replace(self._place, step=step, round=round)

    @contextlib.contextmanager
    def calling(self, call: str) -> Generator[None]:
        """Note a collective call, which fails where a rank makes it alone."""
        self._place = replace(self._place, call=call, call_number=self._place.call_number + 1)
        with contextlib.suppress(RuntimeError):  # a store that is gone stops no healthy ranks
            self.store.set(f"call/{self.rank}", f"{self._place.call_number} {call}")
        try:
            yield
        finally:
            self._place = replace(self._place, call="")

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
        self._blocked_since = time.monotonic()
        try:
            yield
        finally:
            self._blocked_since = None

    def watch(self) -> None:
        """Begin to tell the others when this rank is blocked for long, from a thread."""
        self._watcher.start()

    def _watch(self) -> None:
        limit = min(_BLOCKED_S, self._search_s / 4)
        posted: Notice | None = None
        warned = 0.0
        while not self._ended.wait(limit / 2):
            since = self._blocked_since
            blocked = 0.0 if since is None else time.monotonic() - since
            what, peers = self._awaited
            notice = replace(self._place, what=what, peers=peers) if blocked > limit else None
            # Whoever fails will say that the store is gone, if it is.
            with contextlib.suppress(RuntimeError):
                if notice is not None and notice != posted:
                    self._post(notice)
                elif notice is None and posted is not None:
                    self.store.set(f"notice/{self.rank}", "")  # it went on
            posted = notice
            if notice is not None and blocked > _WARN_S and since != warned:
                warned = since
                _log.warning("%s, for %.0f s so far", _describe(notice), blocked)

    def end(self) -> None:
        """End all threads, where the store lets them."""
        self._ended.set()
        for thread in (self._watcher, *self._searches):
            if thread.is_alive():
                thread.join(self._search_s)

    # - Failures; see Note [Finding the cause]

    @property
    def broken(self) -> bool:
        """Whether something failed: nothing that was sent or received may be used any more."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise what failed first, if anything did."""
        if self._failure is not None:
            raise self._failure

    def failure(self, what: str, peers: tuple[int, ...], error: RuntimeError) -> ExchangeError:
        """Return the error to raise where a wait failed.

        The first one stays: what fails after it fails because of it.
        """
        with self._lock:
            if self._failure is None:
                if self._ended.is_set():  # nobody asks any more, and threads must come to an end
                    return ExchangeError(f"rank {self.rank} has ended its gossip")
                self._ended.set()  # the watcher must not overwrite the last notice
                own = replace(self._place, what=what, peers=peers, final=True)
                lost = not re.search("timed? ?out", str(error), re.IGNORECASE)
                deadline = time.monotonic() + self._search_s
                cause, culprit = self._ask(
                    lambda: self._find_cause(own, lost=lost, deadline=deadline), _NO_ANSWER
                )
                self._failure = ExchangeError(
                    f"{_describe(own)}, and failed: {cause} (timeout {self.timeout})", culprit
                )
            return self._failure

    def disagreement(self, others: Sequence[int], message: str) -> ExchangeError:
        """Return the error to raise where other ranks have sent something else."""
        with self._lock:
            if self._failure is None:
                self._ended.set()
                culprit = others[0] if len(others) == 1 else None
                self._failure = ExchangeError(message, culprit)
            return self._failure

    def calls_of(self, ranks: Sequence[int]) -> str:
        """Return which calls other ranks have made last, in words.

        They may be over: what ranks gather at every step is not noted, for that would cost time.
        """
        calls = self._ask(lambda: [self._get(f"call/{rank}") for rank in ranks], [])
        if not calls:
            return f"{name_ranks(ranks)} elsewhere"
        return ", ".join(
            f"rank {rank} last called {call.partition(' ')[2]}"
            if call
            else f"rank {rank} has made no collective call"
            for rank, call in zip(ranks, calls, strict=True)
        )

    def leave(self, reason: str) -> None:
        """Tell the others why this rank ends before they do."""
        self.end()
        if self._failure is None:
            notice = Notice(rank=self.rank, step=self._place.step, what=reason, final=True)
            self._ask(lambda: self._post(notice), None)

    @contextlib.contextmanager
    def leaving_on_error(self) -> Generator[None]:
        """Tell the others about an exception that passes through."""
        try:
            yield
        except BaseException as error:
            self.leave(f"raised {error!r}")
            raise

    def _ask(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return the answer, or the other one where asking fails or takes too long.

        On a thread: a store whose process is stopped does not answer, and has no timeout itself.
        """
        answers: list[Answer] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question())

        thread = threading.Thread(target=run, name="gossamer-search", daemon=True)
        self._searches.append(thread)
        thread.start()
        thread.join(1.5 * self._search_s)
        return answers[0] if answers else otherwise

    def _post(self, notice: Notice) -> None:
        self.store.set(f"notice/{self.rank}", json.dumps(asdict(notice)))

    def _find_cause(self, own: Notice, *, lost: bool, deadline: float) -> _Cause:
        """Follow notices from our own; return the cause, and the rank to blame for it.

        Args:
            own: what this rank posts.
            lost: whether a connection was lost, and not a time exceeded: then the peer has ended,
                and a notice that it posted while it was blocked does not explain that.
            deadline: when to stop looking.
        """
        self._post(own)
        seen = [own]
        while time.monotonic() < deadline:
            notice = seen[-1]
            if not notice.peers:
                return _end_of(notice)
            if notice.call:
                return self._explain_call(notice)
            peer, found = self._next_notice(notice, final=lost and notice is own)
            if found is None:
                saw_it_go = lost and len(seen) == 1
                return _Cause(f"rank {peer} is {'gone' if saw_it_go else 'gone or stalled'}", peer)
            if _mixes_otherwise(found, notice):
                ranks = name_ranks([notice.rank, peer])
                return _Cause(f"{ranks} mix with different rounds at step {notice.step}", peer)
            if found in seen:
                return _Cause(f"{name_ranks([n.rank for n in seen])} wait for each other", None)
            seen.append(found)
        return _Cause(f"rank {seen[-1].rank} does not go on, and why took too long to find", None)

    def _explain_call(self, notice: Notice) -> _Cause:
        """A collective call failed: somebody was not in it, or is gone."""
        same = f"{notice.call_number} {notice.call}"
        absent = [rank for rank in notice.peers if self._get(f"call/{rank}") != same]
        for rank in absent or notice.peers:
            found = self._find_notice(rank)
            if found is not None and not found.peers:
                return _end_of(found)
        if absent:
            return _Cause(
                f"rank {notice.rank} called {notice.call} at step {notice.step}, and "
                f"{name_ranks(absent)} did not, or went away; every rank must make this call",
                absent[0] if len(absent) == 1 else notice.rank,
            )
        return _Cause(f"one of {name_ranks(notice.peers)} went away in {notice.call}", None)

    def _next_notice(self, notice: Notice, *, final: bool) -> tuple[int, Notice | None]:
        """Return the peer that explains most, and its notice.

        That is one that ended, one that mixes with another round, one without a notice, any other.
        """
        deadline = time.monotonic() + self._search_s / 2
        pause = 0.02
        while True:
            found = {peer: self._find_notice(peer) for peer in notice.peers}
            ended = [p for p, n in found.items() if n and not n.peers]
            differing = [p for p, n in found.items() if n and _mixes_otherwise(n, notice)]
            absent = [p for p, n in found.items() if n is None]
            blocked = [p for p, n in found.items() if n and final and not n.final]
            explained = ended or differing
            if explained or not (absent or blocked) or time.monotonic() >= deadline:
                peer = (explained or absent or blocked or [*found])[0]
                return peer, found[peer] if explained or peer not in blocked else None
            time.sleep(pause)
            pause *= 1.5  # many ranks may be looking

    def _find_notice(self, rank: int) -> Notice | None:
        text = self._get(f"notice/{rank}")
        if not text:
            return None
        notice = Notice(**json.loads(text))
        return replace(notice, peers=tuple(notice.peers))  # a list in JSON

    def _get(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""


def _private_store(process_group: ProcessGroup) -> PrefixStore:
    """Return a part of the group's store that no other gossip uses.

    Starting one is a collective call, so its number among those that this rank has started is the
    same on all ranks.
    """
    store = process_group.get_group_store()
    serial = store.add(f"gossamer/opened/{process_group.rank()}", 1)
    return PrefixStore(f"gossamer/{serial}", store)


def _describe(notice: Notice) -> str:
    during = f" in {notice.call}" if notice.call else ""
    return f"rank {notice.rank} at step {notice.step}{during} waits for {notice.what}"


def _mixes_otherwise(one: Notice, other: Notice) -> bool:
    return bool(one.round) and one.round != other.round and one.step == other.step


def _end_of(notice: Notice) -> _Cause:
    return _Cause(f"rank {notice.rank} {notice.what} at step {notice.step}", notice.rank)


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, as in "rank 3" or "ranks 1, 2".

    >>> name_ranks([1, 2])
    'ranks 1, 2'
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
