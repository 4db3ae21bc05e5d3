"""The records that members write to the store about each epoch, and their access to them.

Keys are under ``members/``. ``current`` holds the epoch that began last and its members. Each epoch
has a ``log`` (records ``alive`` and ``here``), ``left``, ``asked`` (requests to join), ``seen`` (a
member has read a request), ``decision`` and ``ready``.

Members write concurrently. Records are therefore appended, and values that may be written once go
through ``compare_set``; a plain ``set`` would overwrite another member's record.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, final

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore

from gossamer.gossip.failures import ExchangeError
from gossamer.gossip.store_query import Answer, query

STEP = "optimizer.step()"
"""``Arrival.call`` of a worker that waits before the update of a step."""

CURRENT = "current"
"""Key of the epoch that began last and its members; a worker that joins reads it."""

Record: TypeAlias = Mapping[str, Any]
"""One line of JSON."""


@final
@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The record by which a worker asks to be a member of the next epoch."""

    member: int
    step: int
    """Its next step, or the one that it is in before the update."""

    why: str
    """The failure that it detected."""

    call: str = ""
    """The collective call that it is in, or ``STEP`` if it waits before an update."""

    updated: bool = False
    """Whether it has just updated its parameters, and made no collective call since."""

    joins: bool = False
    """Whether it has no trained state yet, and needs a donor."""

    token: str = ""
    """Random, to tell two processes that ask to join as the same worker apart."""

    came_later: bool = False
    """Whether it joined a running job."""

    calls_done: int = 0
    """How many collective calls it has done its part of."""

    opened: bool = True
    """Whether it had connected to all members of this epoch."""

    timed_out: bool = False
    """Whether one of its own waits timed out, rather than a connection closed or an alarm came."""

    closed: tuple[int, ...] = ()
    """Members whose connections it saw close."""

    waited_for: tuple[int, ...] = ()
    """The member that its failed wait was for, if there was exactly one."""


@final
@dataclass(frozen=True, kw_only=True)
class Decision:
    """How the next epoch begins."""

    members: tuple[int, ...]
    """In the order of their ranks."""

    step: int
    """The first step that all of them mix in; a member that is behind takes local steps until
    then."""

    calls_done: int
    """How many collective calls every one of them has done its part of."""

    gone: Mapping[int, str] = field(default_factory=dict[int, str])
    """Members of the epoch before that were removed, with the reason."""

    donors: Mapping[int, int] = field(default_factory=dict[int, int])
    """For each member that joins, the one that sends its state."""

    tokens: Mapping[int, str] = field(default_factory=dict[int, str])
    """For each member that joins, the ``Arrival.token`` of the process that was admitted."""

    entry: int = 0
    """The first step of members that join."""

    error: str = ""
    """Why there is no next epoch: the failure is a bug in the program, not a lost worker."""


@final
class EpochLog:
    """One worker's access to the records.

    Args:
        store: a part of it that no other gossip uses.
        member: this worker's number.
        answer_s: deadline of a query, in seconds.
    """

    def __init__(self, store: Store, member: int, answer_s: float) -> None:
        # A connection of its own: a client that blocks on a key serves no other query meanwhile.
        self._all = clone(store)
        self._store: Any = PrefixStore("members", self._all)  # torch's types lack append
        self._member = member
        self._answer_s = answer_s
        self.epoch = 0
        """The epoch whose records are read and written, unless a method is given another."""

    # - Records

    def append(self, name: str, epoch: int | None = None, **record: Any) -> None:
        """Append a record."""
        key, line = self._key(name, epoch), json.dumps(record) + "\n"
        self._query(lambda: self._store.append(key, line))

    def records(self, name: str, epoch: int | None = None) -> list[dict[str, Any]]:
        """Return all records under a name, oldest first."""
        key = self._key(name, epoch)
        return self._query(lambda: self._records(key))

    def read(self) -> tuple[list[dict[str, Any]], ...]:
        """Return the log, the members that have left, and the requests to join."""
        keys = [self._key(name) for name in ("log", "left", "asked")]
        return self._query(lambda: tuple(map(self._records, keys)))

    # - Values

    def begin(self, members: tuple[int, ...], timeout_s: float) -> None:
        """Write the members of the first epoch, unless another member has.

        The deadline is the whole timeout: nobody waits for this worker to answer yet, and a store
        that many workers connect to at once may be slow.
        """
        value = _current(0, members)
        self._query(lambda: self._store.compare_set(CURRENT, "", value), timeout_s)

    def advance(self, members: tuple[int, ...], following: tuple[int, ...]) -> None:
        """Enter the next epoch, and write its members, unless another member has."""
        # A worker that joins passes no members, so it never writes: it must not overwrite a later
        # epoch with one that it learns of too late.
        before, after = _current(self.epoch, members), _current(self.epoch + 1, following)
        self._query(lambda: self._store.compare_set(CURRENT, before, after))
        self.epoch += 1

    def current(self) -> tuple[int, tuple[int, ...]]:
        """Return the epoch that began last, and its members."""
        epoch, members = json.loads(self._query(lambda: self._store.get(CURRENT)))
        return epoch, tuple(members)

    def decide(self, proposal: Decision) -> None:
        """Write a proposal; the first one that is written is the decision."""
        key, value = self._key("decision"), json.dumps(asdict(proposal))
        self._query(lambda: self._store.compare_set(key, "", value))

    def decision(self) -> Decision | None:
        """Return the decision, if there is one yet."""
        return self._query(self._decision)

    def is_seen(self) -> bool:
        """Return whether a member has read a request to join."""
        return self._query(lambda: self.has("seen", self.epoch))

    def discard_past(self) -> None:
        """Delete the records of all epochs but this one and the one before."""

        def discard() -> None:
            for key in self._all.list_keys():
                if _is_past(key, self.epoch):
                    self._all.delete_key(key)

        with contextlib.suppress(RuntimeError):
            self._query(discard)

    # - Without a deadline: only for a thread that nothing waits for

    def has(self, name: str, epoch: int) -> bool:
        """Return whether a key exists."""
        return self._store.check([self._key(name, epoch)])

    def mark(self, name: str, epoch: int) -> None:
        """Create a key without a value."""
        self._store.set(self._key(name, epoch), "")

    # - The store

    def _key(self, name: str, epoch: int | None = None) -> str:
        return f"{self.epoch if epoch is None else epoch}/{name}"

    def _records(self, key: str) -> list[dict[str, Any]]:
        lines = self._store.get(key).decode() if self._store.check([key]) else ""
        return [json.loads(line) for line in lines.splitlines()]

    def _decision(self) -> Decision | None:
        key = self._key("decision")
        if not self._store.check([key]):
            return None
        fields: dict[str, Any] = json.loads(self._store.get(key))
        fields["members"] = tuple(fields["members"])  # JSON has lists, and strings as keys
        for name in ("gone", "donors", "tokens"):
            fields[name] = {int(member): value for member, value in fields[name].items()}
        return Decision(**fields)

    def _query(self, question: Callable[[], Answer], answer_s: float | None = None) -> Answer:
        """Return the store's answer; without one, this worker leaves."""
        answer_s = self._answer_s if answer_s is None else answer_s
        try:
            return query(question).result(answer_s)
        except TimeoutError:
            detail = f" within {answer_s:g} s"
        except RuntimeError as error:  # of the store
            detail = f": {error}"
        raise ExchangeError(
            f"members must reach the store to agree on who goes on, and worker {self._member} got "
            f"no answer{detail}; this worker leaves. Check the network, and the process that holds "
            "the store"
        )


def arrivals_in(log: Sequence[Record]) -> dict[int, Arrival]:
    """Return each worker's last arrival that it has not withdrawn, in the order of the first."""
    found: dict[int, Arrival] = {}
    for record in log:
        if "withdraws" in record:
            member, token = record["withdraws"]
            if member in found and found[member].token == token:
                del found[member]
        if "here" in record:
            fields: dict[str, Any] = record["here"]
            fields |= {name: tuple(fields[name]) for name in ("closed", "waited_for")}  # from lists
            found[fields["member"]] = Arrival(**fields)
    return found


def clone(store: Store) -> Store:
    """Return the same store on a new connection."""
    untyped: Any = store
    return untyped.clone()


def _current(epoch: int, members: tuple[int, ...]) -> str:
    return json.dumps([epoch, members])


def _is_past(key: str, epoch: int) -> bool:
    """Return whether a key belongs to an epoch before the last one.

    >>> [_is_past(key, 2) for key in ("members/0/log", "members/1/log", "members/current", "facts")]
    [True, False, False, False]
    """
    kind, _, rest = key.partition("/")
    number = rest.partition("/")[0]
    if kind in ("members", "epoch"):
        return number.isdecimal() and int(number) < epoch - 1
    return epoch > 1 and key != "facts"  # other keys belong to the first epoch
