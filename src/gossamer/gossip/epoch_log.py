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
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, TypeVar, final

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore

from gossamer.gossip.failures import ExchangeError

STEP = "optimizer.step()"

CURRENT = "current"
"""The key of the epoch that has begun last, and its members: who joins finds them there."""

Line: TypeAlias = Mapping[str, Any]

_Answer = TypeVar("_Answer")


@final
@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What a member says when it asks for the next epoch."""

    member: int
    step: int
    """The step that it takes next, or is in before its update."""

    why: str
    """What it has seen."""

    call: str = ""
    """The collective call that it is in, or ``STEP`` where a step waits before its update."""

    updated: bool = False
    """Whether it is right behind the update of a step, before it has made any other call."""

    joins: bool = False
    """Whether it has nothing to go on from yet, and needs a donor."""

    token: str = ""
    """What tells one that joins from another with its number."""

    came_later: bool = False
    """Whether it joined others that trained already."""

    calls_done: int = 0
    """How many collective calls it has done its part of."""

    opened: bool = True
    """Whether it had connected with all members of this epoch."""

    timed_out: bool = False
    """Whether a wait of it took too long; what it has seen is not only others' failure."""

    closed: tuple[int, ...] = ()
    """Members whose ends of connections are closed."""

    waited_for: tuple[int, ...] = ()
    """Members that it waited for in vain."""


@final
@dataclass(frozen=True, kw_only=True)
class Decision:
    """How the next epoch begins."""

    members: tuple[int, ...]
    """In the order of their ranks."""

    step: int
    """The first step that all of them take together; who is behind gets there by local steps."""

    calls_done: int
    """How many collective calls all of them have done their part of."""

    gone: Mapping[int, str] = field(default_factory=dict[int, str])
    """Why others are no longer members."""

    donors: Mapping[int, int] = field(default_factory=dict[int, int])
    """For each member that joins, the one that it gets everything from."""

    tokens: Mapping[int, str] = field(default_factory=dict[int, str])
    """For each of these, that of the worker which is let in."""

    entry: int = 0
    """The step that they begin with."""

    error: str = ""
    """Why there is no next epoch: what failed is the program, not a worker."""


@final
class EpochLog:
    """One worker's access to what members write.

    Args:
        store: where, on a part of it that no other gossip uses.
        member: what this worker is called.
        answer_s: how long the store may take to answer.
    """

    def __init__(self, store: Store, member: int, answer_s: float) -> None:
        # A connection of its own: while one waits for a key, nothing else can be asked on it.
        self._all = clone(store)
        self._store: Any = PrefixStore("members", self._all)  # torch's types lack append
        self._member = member
        self._answer_s = answer_s
        self.epoch = 0
        """The epoch that is read and written where none is named."""

    # - Lines

    def append(self, name: str, epoch: int | None = None, **said: Any) -> None:
        """Add a line to those of an epoch."""
        key, line = self._key(name, epoch), json.dumps(said) + "\n"
        self._ask(lambda: self._store.append(key, line))

    def lines(self, name: str, epoch: int | None = None) -> list[dict[str, Any]]:
        """Return the lines of an epoch, in the order in which they were written."""
        key = self._key(name, epoch)
        return self._ask(lambda: self._lines(key))

    def read(self) -> tuple[list[dict[str, Any]], ...]:
        """Return the log, who has left, and who asks to join."""
        keys = [self._key(name) for name in ("log", "left", "asked")]
        return self._ask(lambda: tuple(map(self._lines, keys)))

    # - Values

    def begin(self, members: tuple[int, ...]) -> None:
        """Note the members of the first epoch, unless another has."""
        self._ask(lambda: self._store.compare_set(CURRENT, "", _current(0, members)))

    def advance(self, members: tuple[int, ...], following: tuple[int, ...]) -> None:
        """Go to the next epoch, and note who is in it, unless another has."""
        before, after = _current(self.epoch, members), _current(self.epoch + 1, following)
        self._ask(lambda: self._store.compare_set(CURRENT, before, after))
        self.epoch += 1

    def current(self) -> tuple[int, tuple[int, ...]]:
        """Return the epoch that has begun last, and its members."""
        epoch, members = json.loads(self._ask(lambda: self._store.get(CURRENT)))
        return epoch, tuple(members)

    def decide(self, proposal: Decision) -> None:
        """Propose how the next epoch begins; the first proposal is the decision."""
        key, value = self._key("decision"), json.dumps(asdict(proposal))
        self._ask(lambda: self._store.compare_set(key, "", value))

    def decision(self) -> Decision | None:
        """Return how the next epoch begins, where that is decided."""
        return self._ask(self._decision)

    def is_seen(self) -> bool:
        """Return whether a member has seen who asks to join."""
        return self._ask(lambda: self.has("seen", self.epoch))

    def discard_past(self) -> None:
        """Remove from the store what the epochs before the last one have left there."""

        def discard() -> None:
            for key in self._all.list_keys():
                if _is_past(key, self.epoch):
                    self._all.delete_key(key)

        with contextlib.suppress(RuntimeError):
            self._ask(discard)

    # - Without a limit of time, for a thread that nobody waits for

    def has(self, name: str, epoch: int) -> bool:
        """Return whether anything of that name is written."""
        return self._store.check([self._key(name, epoch)])

    def mark(self, name: str, epoch: int) -> None:
        """Write that name, with nothing."""
        self._store.set(self._key(name, epoch), "")

    # - The store

    def _key(self, name: str, epoch: int | None = None) -> str:
        return f"{self.epoch if epoch is None else epoch}/{name}"

    def _lines(self, key: str) -> list[dict[str, Any]]:
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        return [json.loads(line) for line in text.splitlines()]

    def _decision(self) -> Decision | None:
        key = self._key("decision")
        if not self._store.check([key]):
            return None
        said: dict[str, Any] = json.loads(self._store.get(key))
        said["members"] = tuple(said["members"])  # a list in JSON, whose keys are strings
        for field_name in ("gone", "donors", "tokens"):
            said[field_name] = {int(member): of for member, of in said[field_name].items()}
        return Decision(**said)

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Return the store's answer; on a thread, because one that is cut off never gives any."""
        answers: list[_Answer] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(question())
            except Exception as error:  # this thread has nobody to tell
                errors.append(error)

        thread = threading.Thread(target=run, name="gossamer-ask", daemon=True)
        thread.start()
        thread.join(self._answer_s)
        if answers:
            return answers[0]
        if errors and not isinstance(errors[0], RuntimeError):  # not of the store
            raise errors[0]
        said = f": {errors[0]}" if errors else f" within {self._answer_s:g} s"
        raise ExchangeError(
            f"members must reach the store to agree on who goes on, and worker {self._member} got "
            f"no answer{said}; it leaves. Look for a network that is cut, or for the process that "
            "holds the store"
        )


def arrivals_in(log: Sequence[Line]) -> dict[int, Arrival]:
    """Return who asks for the next epoch, in the order in which they did, by member."""
    found: dict[int, Arrival] = {}
    for line in log:
        if "withdraws" in line:
            member, token = line["withdraws"]
            if member in found and found[member].token == token:
                del found[member]
        if "here" in line:
            said: dict[str, Any] = line["here"]
            said |= {name: tuple(said[name]) for name in ("closed", "waited_for")}  # lists in JSON
            found[said["member"]] = Arrival(**said)
    return found


def clone(store: Store) -> Store:
    """Return the same store, on a connection of its own."""
    untyped: Any = store
    return untyped.clone()


def _current(epoch: int, members: tuple[int, ...]) -> str:
    return json.dumps([epoch, members])


def _is_past(key: str, epoch: int) -> bool:
    """Whether a key is of an epoch before the last one.

    >>> [_is_past(key, 2) for key in ("members/0/log", "members/1/log", "members/current", "facts")]
    [True, False, False, False]
    """
    kind, _, rest = key.partition("/")
    number = rest.partition("/")[0]
    if kind in ("members", "epoch"):
        return number.isdecimal() and int(number) < epoch - 1
    return epoch > 1 and key != "facts"  # all else is of the first
