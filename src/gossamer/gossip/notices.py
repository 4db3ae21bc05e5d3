"""What ranks tell each other through the store: where they are, and why they stopped.

The store is the side channel: it works before anything has been sent, and after a connection is
lost.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TypeVar, final

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore

_SEARCH_S = 4.0
"""How long a failing rank looks for the cause, or half its timeout. The store may not answer."""

_MOST_SAID = 500
"""Characters of an exception that go into a notice: enough to know it by."""

Answer = TypeVar("Answer")


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

    ended: bool = False
    """Whether it has taken all its steps, and ended its gossip in order."""

    def __str__(self) -> str:
        """Say where the rank is and what it waits for."""
        during = f" in {self.call}" if self.call else ""
        return f"rank {self.rank} at step {self.step}{during} waits for {self.what}"

    @property
    def numbered_call(self) -> str:
        """The collective call, so that two ranks in the same one say the same."""
        return f"{self.call_number} {self.call}"

    def mixes_otherwise(self, other: Notice) -> bool:
        """Whether two ranks are at the same step, with different rounds."""
        return bool(self.round) and self.round != other.round and self.step == other.step


@final
class NoticeBoard:
    """One rank's access to the store, in a part of it that no other gossip uses.

    Args:
        process_group: gives rank, size and store.
        timeout: how long ranks wait for each other.
        serial: of the gossip, where that began before.
    """

    def __init__(self, process_group: ProcessGroup, timeout: timedelta, serial: int = 0) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self.timeout = timeout
        self.search_s = min(_SEARCH_S, timeout.total_seconds() / 2)
        """How long a rank that failed looks for the cause."""
        # Starting a gossip is a collective call, so its number among those that this rank has
        # started is the same on all ranks.
        store = process_group.get_group_store()
        serial = serial or store.add(f"gossamer/opened/{self.rank}", 1)
        self.store = PrefixStore(f"gossamer/{serial}", store)
        self._threads: list[threading.Thread] = []

    def post(self, notice: Notice) -> None:
        """Show this rank's notice in place of the one before."""
        self.store.set(f"notice/{self.rank}", json.dumps(asdict(notice)))
        if notice.final and not notice.ended:
            self.store.compare_set("failed", "", str(self.rank))  # the first one's stays

    def take_back(self) -> None:
        """Remove this rank's notice: it went on."""
        self.store.set(f"notice/{self.rank}", "")

    def will_come(self, peer: int) -> bool:
        """Return whether a peer that is late may still come: nobody has failed, nor has it ended.

        One who was never connected with a rank does not see it end, but others have.
        """
        notice = self.notice_of(peer)
        return not self.store.check(["failed"]) and (notice is None or not notice.final)

    def first_failure(self) -> Notice | None:
        """Return what the rank that failed first shows, if any has."""
        failed = self._get("failed")
        return self.notice_of(int(failed)) if failed else None

    def notice_of(self, rank: int) -> Notice | None:
        """Return what a rank shows, if anything."""
        posted = self._get(f"notice/{rank}")
        if not posted:
            return None
        notice = Notice(**json.loads(posted))
        return replace(notice, peers=tuple(notice.peers))  # a list in JSON

    def post_call(self, notice: Notice) -> None:
        """Show which collective call this rank has begun."""
        self.store.set(f"call/{self.rank}", notice.numbered_call)

    def call_of(self, rank: int) -> str:
        """Return the collective call that a rank began last, with its number."""
        return self._get(f"call/{rank}")

    def call_number(self, rank: int) -> int:
        """Return how many collective calls a rank has begun."""
        return int(self.call_of(rank).partition(" ")[0] or 0)

    def discard(self) -> None:
        """Say that this rank asks and tells nothing more; the last rank to do so removes all keys.

        A store outlives the gossips on it: a job that opens one after the other must not fill it.
        """

        def count() -> None:
            if self.store.add("discarded", 1) == self.size:
                for key in self.store.list_keys():
                    self.store.delete_key(key)

        self.ask(count, None)

    def ask(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return the answer, or the other one where asking fails or takes too long.

        On a thread: a store whose process is stopped does not answer, and has no timeout itself.
        """
        answers: list[Answer] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question())

        thread = threading.Thread(target=run, name="gossamer-search", daemon=True)
        self._threads.append(thread)
        thread.start()
        thread.join(1.5 * self.search_s)
        return answers[0] if answers else otherwise

    def end(self) -> None:
        """End all threads that still ask, where the store lets them."""
        for thread in self._threads:
            if thread.is_alive():  # one that is not started yet, by another thread, has no end
                thread.join(self.search_s)

    def _get(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""


def describe(error: BaseException, in_words: Callable[[BaseException], str] = repr) -> str:
    """Say what was raised in a few words, whatever the exception is made of.

    >>> describe(ValueError("x" * 3000))[:20], len(describe(ValueError("x" * 3000)))
    ("ValueError('xxxxxxxx", 500)
    """
    try:
        said = in_words(error)
    except Exception:  # its own code, at a moment when others wait for a word
        said = f"{type(error).__name__}, which cannot say what it is"
    return said if len(said) <= _MOST_SAID else said[: _MOST_SAID - 1] + "…"


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, as in "rank 3" or "ranks 1, 2".

    >>> name_ranks([1, 2])
    'ranks 1, 2'
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
