"""The notices that ranks post in the store: where each is, and why it stopped.

The store is a side channel: it works before ranks are connected, and after a connection is lost.
It may also block forever, if the process that holds it is stopped: a query on a thread that
somebody waits for goes through ``NoticeBoard.ask``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, final

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore

from gossamer.gossip.store_query import Answer, query

_log = logging.getLogger(__name__)

_SEARCH_S = 4.0
"""How long a failing rank searches for the cause, or half its timeout: the store may not answer."""

_MAX_CHARS = 500
"""Of an exception in a notice: enough to recognize it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What one rank reports about itself."""

    rank: int
    step: int
    what: str
    """What it waits for, or did."""

    peers: tuple[int, ...] = ()
    """The ranks that it waits for; none if the notice itself is the cause."""

    round: str = ""
    """Digest of the round that it mixes with."""

    call: str = ""
    """The collective call that it is in."""

    call_number: int = 0
    """How many collective calls it has made, including this one."""

    final: bool = False
    """Whether it has stopped, and is not only blocked."""

    ended: bool = False
    """Whether it has taken all its steps and closed its gossip."""

    def __str__(self) -> str:
        """Return where the rank is and what it waits for."""
        during = f" in {self.call}" if self.call else ""
        return f"rank {self.rank} at step {self.step}{during} waits for {self.what}"

    @property
    def numbered_call(self) -> str:
        """The collective call with its number: equal on two ranks that are in the same call."""
        return f"{self.call_number} {self.call}"

    def mixes_otherwise(self, other: Notice) -> bool:
        """Return whether two ranks are at the same step with different rounds."""
        return bool(self.round) and self.round != other.round and self.step == other.step


@final
class NoticeBoard:
    """One rank's access to the notices, in a part of the store that no other gossip uses.

    Args:
        process_group: gives rank, size and store.
        timeout: how long ranks wait for each other.
        serial: number of the gossip, if it is running already.
    """

    def __init__(self, process_group: ProcessGroup, timeout: timedelta, serial: int = 0) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self.timeout = timeout
        self.search_s = min(_SEARCH_S, timeout.total_seconds() / 2)
        """How long a rank that failed searches for the cause."""
        # Starting a gossip is a collective call, so all ranks count the same number of them.
        store = process_group.get_group_store()
        serial = serial or store.add(f"gossamer/opened/{self.rank}", 1)
        self.store = PrefixStore(f"gossamer/{serial}", store)
        self._pending: set[Future[Any]] = set()

    def post(self, notice: Notice) -> None:
        """Replace this rank's notice."""
        self.store.set(f"notice/{self.rank}", json.dumps(asdict(notice)))
        if notice.final and not notice.ended:
            self.store.compare_set("failed", "", str(self.rank))  # the first failure stays

    def take_back(self) -> None:
        """Clear this rank's notice: it is no longer blocked."""
        self.store.set(f"notice/{self.rank}", "")

    def will_come(self, peer: int) -> bool:
        """Return whether a peer may still connect: no rank has failed, and the peer has not ended.

        A rank that was never connected to a peer does not see it end, but other ranks do.
        """
        notice = self.notice_of(peer)
        return not self.store.check(["failed"]) and (notice is None or not notice.final)

    def first_failure(self) -> Notice | None:
        """Return the notice of the rank that failed first, if any has."""
        failed = self._get("failed")
        return self.notice_of(int(failed)) if failed else None

    def notice_of(self, rank: int) -> Notice | None:
        """Return a rank's notice, if it has posted one."""
        posted = self._get(f"notice/{rank}")
        if not posted:
            return None
        notice = Notice(**json.loads(posted))
        return replace(notice, peers=tuple(notice.peers))  # a list in JSON

    def post_call(self, numbered_call: str) -> None:
        """Post the collective call that this rank has begun; empty before the first."""
        self.store.set(f"call/{self.rank}", numbered_call)

    def call_of(self, rank: int) -> str:
        """Return the last collective call that a rank has begun, with its number."""
        return self._get(f"call/{rank}")

    def call_numbers(self) -> list[int]:
        """Return how many collective calls each rank has begun; none if one has yet to post.

        Two queries for any number of ranks: all of them ask in every step while a worker joins.
        """
        keys = [f"call/{rank}" for rank in range(self.size)]
        calls = self.store.multi_get(keys) if self.store.check(keys) else []
        return [int(call.decode().partition(" ")[0] or 0) for call in calls]

    def discard(self) -> None:
        """Give up this board; the last rank to do so deletes all its keys.

        The store outlives gossips: a job that opens many of them must not fill it.
        """

        def count() -> None:
            if self.store.add("discarded", 1) == self.size:
                for key in self.store.list_keys():
                    self.store.delete_key(key)

        self.ask(count, None)

    def ask(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return the answer to a query, or a default if it fails or takes too long.

        Queries help to explain a failure, which none of their own may hide. That of a store is a
        RuntimeError; another is a mistake in the query, and is logged.
        """
        answer = query(question)
        self._pending.add(answer)
        try:
            return answer.result(1.5 * self.search_s)
        except (RuntimeError, TimeoutError):
            return otherwise
        except Exception:
            _log.exception("a query to the store failed")
            return otherwise
        finally:
            if answer.done():
                self._pending.discard(answer)
            del answer  # an error in it refers to this frame

    def end(self) -> None:
        """Wait for pending queries, if the store answers."""
        wait(self._pending.copy(), self.search_s)
        self._pending.clear()  # a late error refers to what was asked, such as a connection

    def _get(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""


def describe(error: BaseException, in_words: Callable[[BaseException], str] = repr) -> str:
    """Return an exception in words, truncated; never raises.

    >>> describe(ValueError("x" * 3000))[:20], len(describe(ValueError("x" * 3000)))
    ("ValueError('xxxxxxxx", 500)
    """
    try:
        words = in_words(error)
    except Exception:  # a user's class may raise in __repr__, and peers wait for this notice
        words = f"{type(error).__name__} (which cannot be printed)"
    return words if len(words) <= _MAX_CHARS else words[: _MAX_CHARS - 1] + "…"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> name_ranks([1, 2])
    'ranks 1, 2'
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
