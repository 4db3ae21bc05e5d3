"""Who takes part, from epoch to epoch: agreed on through a store that no worker holds.

Note [Epochs]
The members of an epoch are fixed. Whoever loses one says in the log of the epoch that it is there
itself, and only then lets go of its connections; others see these close, or the log, and do the
same. So a connection that is closed by a worker which is not in the log belongs to one that is
gone. When its step comes to it, each asks in the log for the next epoch, with what it knows. As
soon as every member has or is judged to be gone, any of them proposes the members of the next
epoch; the store keeps the first proposal, and that is the decision. Nobody is a member of the next
epoch who has not asked for it, so members are never left behind, and a worker that was stalled
finds the decision that went without it.

A worker that comes later asks beside the log. Members see that, and the first that comes to a step
with nobody ahead of it ends the epoch, as if it had lost one. Whoever has asked is then a member of
the next epoch, gets all that training has come to from a *donor*, and takes its first step with the
others. What is left of an epoch in the store is removed when the second one after it begins.

Without the store nobody can be a member: of a network that is cut, the side with the store goes on.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar, final

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore

from gossamer.gossip.failures import ExchangeError

_LOOK_S = 0.05
"""How often a worker looks for a log, at least; longer where there are many."""

_LOOKS_PER_S = 1000
"""How often all workers together look, at most."""

_CLOSED_S = 0.25
"""How long a worker whose connections closed has to say that it is there."""

_ANSWER_S = 4.0
"""How long others have, or half the timeout: their threads answer while they compute."""

_SEEN_S = 10.0
"""How long members have to see that a worker asks to join: their threads look now and then."""

_LOOKS_PER_JOIN = 4
"""A look for those who ask comes once in so many for a log."""

_READY_S = 1.0
"""How long a member that has waited for a decision may take to see it."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
"""Between two looks at the log of those that agree."""

STEP = "optimizer.step()"

_ALARM = "other workers have lost one or let one in, and agree on who goes on"

_NOTHING_LEFT = (
    "a worker that joins needs one to get parameters from, and of those who had any nobody is "
    "left; start the job again, from a checkpoint"
)

_MOST_IN_VAIN = 3
"""Epochs in a row that end where they began, before what fails is taken for the program."""

CURRENT = "current"
"""The key of the epoch that has begun last, and its members: who joins finds them there."""

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
class Membership:
    """One worker's part in agreeing on members; see Note [Epochs].

    Args:
        store: where, on a part of it that no other gossip uses.
        member: what this worker is called, for ever.
        members: of the first epoch; none where this worker comes later.
        timeout: how long a member may compute before it has to come.
    """

    def __init__(
        self, store: Store, member: int, members: Sequence[int], timeout: timedelta
    ) -> None:
        # A connection of its own: while one waits for a key, nothing else can be asked on it.
        self._all = clone(store)
        self._store: Any = PrefixStore("members", self._all)  # torch's types lack append
        self.member = member
        self.members = tuple(members)
        self.epoch = 0
        self._timeout_s = timeout.total_seconds()
        self._answer_s = min(_ANSWER_S, self._timeout_s / 2)
        self._ended = threading.Event()
        self._on_alarm: Callable[[str], None] = lambda reason: None
        self._announced = self._arrived = self._asked = -1
        self._arrival: Arrival | None = None
        self._last: Decision | None = None
        self._num_in_vain = self._num_refused = 0
        self._token = secrets.token_hex(8)
        self._asks = False
        if self.members:
            # Nobody can be lost yet, so a store that is slow to answer has the whole timeout.
            self._ask(
                lambda: self._store.compare_set(CURRENT, "", _current(0, self.members)),
                self._timeout_s,
            )
        self._watcher = threading.Thread(target=self._watch, name="gossamer-members", daemon=True)

    # - While all goes well

    def watch(self, on_alarm: Callable[[str], None]) -> None:
        """Begin to look for an alarm, from a thread, and to answer it.

        Args:
            on_alarm: called on that thread with what others have seen; it must ``announce``.
        """
        self._on_alarm = on_alarm
        if not self._watcher.is_alive():
            self._watcher.start()

    def _watch(self) -> None:
        pause_s = max(_LOOK_S, len(self.members) / _LOOKS_PER_S)
        said_at = 0.0
        num_looks = 0
        while not self._ended.wait(pause_s):
            epoch = self.epoch
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
                    if self._store.check([f"{epoch}/log"]):
                        said_at = time.monotonic()
                        self._on_alarm(_ALARM)
                    elif num_looks % _LOOKS_PER_JOIN == 0 and self._asked < epoch:
                        self._look_for_joiners(epoch)

    def _look_for_joiners(self, epoch: int) -> None:
        if self._store.check([f"{epoch}/asked"]):
            self._store.set(f"{epoch}/seen", "")
            self._asked = epoch

    @property
    def is_asked(self) -> bool:
        """Whether a worker asks to join, so that the next step should end the epoch."""
        return self._asked == self.epoch

    def announce(self, epoch: int) -> None:
        """Say that this worker is there, though the epoch has failed."""
        self._announced = max(self._announced, epoch)
        with contextlib.suppress(RuntimeError):
            self._ask(lambda: self._store.append(f"{epoch}/log", _line(alive=self.member)))

    def heard(self, epoch: int, members: Sequence[int]) -> set[int]:
        """Return the ranks of those who have said so; all, where the store does not answer."""
        try:
            log = self._ask(lambda: self._lines(f"{epoch}/log"))
        except RuntimeError:
            return {*range(len(members))}
        alive = {line["alive"] for line in log if "alive" in line}
        return {rank for rank, member in enumerate(members) if member in alive}

    # - When one is lost

    def arrive(self, arrival: Arrival) -> None:
        """Ask for the next epoch."""
        self._arrived, self._arrival = self.epoch, arrival
        self._ask(lambda: self._store.append(f"{self.epoch}/log", _line(here=asdict(arrival))))

    def agree(self) -> Decision:
        """Return how the next epoch begins, when that is decided.

        Raises:
            ExchangeError: it begins without this worker, or the store does not answer.
        """
        listener = _Listener(self._timeout_s, self._answer_s)
        pause_s = _FIRST_PAUSE_S
        while (decision := self._ask(self._decision)) is None:
            log, left, asked = self._ask(self._read)
            listener.hear(log)
            proposal = _propose(self.members, log, left, asked, listener)
            if proposal is not None and proposal.error == _NOTHING_LEFT:
                # Only one that joins proposes this, and it decides nothing for who has parameters.
                raise ExchangeError(_NOTHING_LEFT)
            if proposal is not None:
                self._ask(lambda proposal=proposal: self._decide(proposal))
                continue
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        if decision.error:
            raise ExchangeError(decision.error)
        # What a worker that was stalled finds, or decides by itself where it finds nothing, is of
        # no use when the epoch after that has ended, too.
        is_past = self._ask(self._now)[0] > self.epoch + 1
        is_out = is_past or self.member not in decision.members
        if self._arrival is not None and self._arrival.joins:
            if is_out:
                self._num_refused += 1
                if self._num_refused > _MOST_IN_VAIN:
                    raise ExchangeError(
                        f"worker {self.member} was let in {self._num_refused} times, and must "
                        f"reach all of {decision.members} itself, which failed: "
                        f"{self._arrival.why}; look for a network that connects it with the store "
                        "only"
                    )
                return self.join(replace(self._arrival, closed=(), waited_for=()))
        elif is_out or self.member in decision.donors:
            why = decision.gone.get(self.member, "it was late")
            raise ExchangeError(
                f"a member must answer in time, and the others went on without worker "
                f"{self.member} at step {decision.step}: {why}; end this process, and start it "
                "anew to let it join (`gossamer launch` does). Where workers compute longer, "
                "allow a longer timeout",
                self.member,
            )
        self._check_progress(decision)
        self._enter(decision)
        return decision

    def _enter(self, decision: Decision) -> None:
        # Until there are connections to break off, nobody is to be told of an alarm.
        self._on_alarm = lambda reason: None
        self._asks = False
        before, after = (self.epoch, self.members), (self.epoch + 1, decision.members)
        self._ask(lambda: self._store.compare_set(CURRENT, _current(*before), _current(*after)))
        self.epoch, self.members = after

    # - When this worker comes later

    def join(self, arrival: Arrival) -> Decision:
        """Ask for membership until an epoch begins with this worker; return how it begins.

        Raises:
            ExchangeError: nobody answers in time, or training has ended.
        """
        deadline = time.monotonic() + 2 * self._timeout_s + _SEEN_S
        pause_s = _FIRST_PAUSE_S
        arrival, self._asks = replace(arrival, token=self._token), True
        self.members = ()  # of the epoch that it asks in it is none, even where one has its number
        while True:
            self.epoch, members = self._ask(self._now)
            epoch = self.epoch
            line = _line(here=asdict(arrival))
            self._ask(lambda epoch=epoch, line=line: self._store.append(f"{epoch}/asked", line))
            asked_at = time.monotonic()
            while (now := self._ask(self._now)[0]) == epoch:
                self._check_answer(members, asked_at, deadline)
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            decision = self._ask(self._decision)
            if decision is None or now > epoch + 1:
                continue  # it was past when this worker asked
            if decision.tokens.get(self.member) == arrival.token:
                self._enter(decision)
                return decision
            if self.member in decision.members:
                raise ExchangeError(
                    f"a worker joins once, and worker {self.member} is a member already, of "
                    f"{decision.members}; start another one with a number of its own"
                )

    def _check_answer(self, members: tuple[int, ...], asked_at: float, deadline: float) -> None:
        """Raise where nobody will let this worker in."""
        left = {line["left"]: line["why"] for line in self._ask(self._read)[1]}
        decision = self._ask(self._decision)
        waited_s = time.monotonic() - asked_at
        if decision is not None and decision.error:
            reason = f"they have ended: {decision.error}"
        elif all(member in left for member in members):
            reason = f"they have ended: worker {members[0]} {left[members[0]]}"
        elif waited_s > _SEEN_S and not self._ask(lambda: self._store.check([self._key("seen")])):
            reason = f"none of them has seen that within {_SEEN_S:g} s: they are gone, or stalled"
        elif time.monotonic() > deadline:
            reason = f"none of them came to a step within {waited_s:.0f} s"
        else:
            return
        raise ExchangeError(f"worker {self.member} asked to join workers {members}, and {reason}")

    def _check_progress(self, decision: Decision) -> None:
        """Raise where epoch after epoch ends as it began; all members see the same decisions."""
        before, self._last = self._last, decision
        ended_at = None if before is None else (before.members, before.step)
        repeats = ended_at == (decision.members, decision.step)
        self._num_in_vain = self._num_in_vain + 1 if repeats else 0
        if self._num_in_vain >= _MOST_IN_VAIN:
            raise ExchangeError(
                f"members must get on with step {decision.step}, and failed "
                f"{self._num_in_vain + 1} times with nobody gone; look at the first warning, and "
                f"at what each of {decision.members} waited for"
            )

    def missing(self) -> list[int]:
        """Return the ranks of members that do not come to the epoch that was decided.

        All of them waited for the decision, so one that is not there at once was lost since.
        """
        key = f"{self.epoch}/ready"
        self._ask(lambda: self._store.append(key, _line(ready=self.member)))
        deadline = time.monotonic() + _READY_S
        pause_s = _FIRST_PAUSE_S
        while True:
            ready = {line["ready"] for line in self._ask(lambda: self._lines(key))}
            missing = [rank for rank, member in enumerate(self.members) if member not in ready]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def leave(self, why: str, *, alarm: bool) -> None:
        """Say that this worker takes part no more.

        Args:
            why: what the others will say of it.
            alarm: whether they wait for it, and must be told at once.
        """
        self._ended.set()
        if self._asks:  # others have not waited for it
            line = _line(withdraws=[self.member, self._token])
            with contextlib.suppress(RuntimeError):
                self._ask(lambda: self._store.append(self._key("asked"), line))
            return
        if self.member not in self.members:
            return
        with contextlib.suppress(RuntimeError):
            self._ask(
                lambda: self._store.append(f"{self.epoch}/left", _line(left=self.member, why=why))
            )
            if alarm:
                self._ask(lambda: self._store.append(f"{self.epoch}/log", _line(alive=self.member)))

    def discard_past(self) -> None:
        """Remove from the store what the epochs before the last one have left there.

        Nobody asks for it, because all members have been in that one; ``agree`` says what becomes
        of a worker that was stalled and has not.
        """

        def discard() -> None:
            for key in self._all.list_keys():
                if _is_past(key, self.epoch):
                    self._all.delete_key(key)

        with contextlib.suppress(RuntimeError):
            self._ask(discard)

    def _key(self, name: str) -> str:
        return f"{self.epoch}/{name}"

    def _now(self) -> tuple[int, tuple[int, ...]]:
        """Return the epoch that has begun last, and its members."""
        epoch, members = json.loads(self._store.get(CURRENT))
        return epoch, tuple(members)

    def _decision(self) -> Decision | None:
        key = self._key("decision")
        if not self._store.check([key]):
            return None
        said: dict[str, Any] = json.loads(self._store.get(key))
        said["members"] = tuple(said["members"])  # a list in JSON, whose keys are strings
        for field_name in ("gone", "donors", "tokens"):
            said[field_name] = {int(member): of for member, of in said[field_name].items()}
        return Decision(**said)

    def _decide(self, proposal: Decision) -> None:
        self._store.compare_set(self._key("decision"), "", json.dumps(asdict(proposal)))

    def _read(self) -> tuple[list[dict[str, Any]], ...]:
        """Return the log, who has left, and who asks to join."""
        return tuple(self._lines(self._key(name)) for name in ("log", "left", "asked"))

    def _lines(self, key: str) -> list[dict[str, Any]]:
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        return [json.loads(line) for line in text.splitlines()]

    def _ask(self, question: Callable[[], _Answer], answer_s: float = 0.0) -> _Answer:
        """Return the store's answer; on a thread, because one that is cut off never gives any."""
        answer_s = answer_s or self._answer_s
        answers: list[_Answer] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(question())
            except Exception as error:  # this thread has nobody to tell
                errors.append(error)

        thread = threading.Thread(target=run, name="gossamer-ask", daemon=True)
        thread.start()
        thread.join(answer_s)
        if answers:
            return answers[0]
        if errors and not isinstance(errors[0], RuntimeError):  # not of the store
            raise errors[0]
        said = f": {errors[0]}" if errors else f" within {answer_s:g} s"
        raise ExchangeError(
            f"members must reach the store to agree on who goes on, and worker {self.member} got "
            f"no answer{said}; it leaves. Look for a network that is cut, or for the process that "
            "holds the store"
        )


@final
class _Listener:
    """Knows how long others have been waited for, and have said nothing.

    Args:
        timeout_s: how long a member that is there may take to come.
        answer_s: how long it may say nothing.
    """

    def __init__(self, timeout_s: float, answer_s: float) -> None:
        self._timeout_s = timeout_s
        self._answer_s = answer_s
        self._began = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}

    def hear(self, log: Sequence[Mapping[str, Any]]) -> None:
        """Note who has said something since the log was read last."""
        now = time.monotonic()
        for member, times in Counter(line["alive"] for line in log if "alive" in line).items():
            if times != self._heard.get(member, (0, 0.0))[0]:
                self._heard[member] = times, now

    def why_gone(self, member: int, arrivals: Mapping[int, Arrival]) -> str:
        """Say why a member that has not arrived is gone; nothing where it may still come."""
        waited_s = time.monotonic() - self._began
        if member in self._heard:
            # It may itself be in a wait that has just begun, and then needs time to answer.
            if waited_s > self._timeout_s + self._answer_s:
                return "it did not come within the timeout"
            silent_s = time.monotonic() - self._heard[member][1]
            return "it gave no further answer" if silent_s > self._answer_s else ""
        if any(member in arrival.closed for arrival in arrivals.values()):
            return "its connections broke" if waited_s > min(_CLOSED_S, self._answer_s) else ""
        connecting = any(not arrival.opened for arrival in arrivals.values())
        enough_s = min(_READY_S, self._answer_s) if connecting else self._answer_s
        return "it gave no answer" if waited_s > enough_s else ""


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


def _line(**said: Any) -> str:
    return json.dumps(said) + "\n"


def _propose(
    members: tuple[int, ...],
    log: Sequence[Mapping[str, Any]],
    left: Sequence[Mapping[str, Any]],
    asked: Sequence[Mapping[str, Any]],
    listener: _Listener,
) -> Decision | None:
    """Return the next epoch, as far as one can tell; None where that is too early."""
    arrivals = _arrivals(log)
    gone: dict[int, str] = {line["left"]: line["why"] for line in left}
    gone |= {line["dead"]: line["why"] for line in log if "dead" in line}
    for member in members:
        if member not in arrivals and member not in gone:
            why = listener.why_gone(member, arrivals)
            if not why:
                return None
            gone[member] = why
    here = [arrivals[member] for member in members if member in arrivals and member not in gone]
    if not here:
        return None
    if not gone:
        # A member that still joins could not connect, or got nothing; and nobody else is lost.
        stuck = [arrival.member for arrival in here if arrival.joins]
        gone |= dict.fromkeys(stuck, "it was let in, and could not connect with all others")
        here = [arrival for arrival in here if not arrival.joins] or here
    joining = {
        arrival.member: arrival.token
        for arrival in (*_arrivals(asked).values(), *here)
        if arrival.joins
    }
    here = [arrival for arrival in here if not arrival.joins]
    if not here:
        return Decision(members=(), step=0, calls_done=0, error=_NOTHING_LEFT)
    present = {arrival.member for arrival in here}
    error = ""
    # The first to arrive saw what happened first: others see that it let go of its connections.
    if len(here) == len(members) and next(iter(arrivals.values())).timed_out:
        if (odd := _odd_one(here)) is not None:
            gone[odd] = f"it joined, and does otherwise than they: {_error_of_program(here)}"
            here = [arrival for arrival in here if arrival.member != odd]
        error = _error_of_program(here)
        if (unreachable := _unreachable(here)) is not None:
            gone[unreachable] = "another member cannot connect with it, though both are there"
            here = [arrival for arrival in here if arrival.member != unreachable]
    entry = _entry(here)
    donors = (
        {}
        if entry is None
        else {member: _donor(here, member) for member in sorted(joining.keys() - present)}
    )
    return Decision(
        members=tuple(sorted([*donors, *(arrival.member for arrival in here)])),
        step=max(arrival.step for arrival in here),
        calls_done=min(arrival.calls_done for arrival in here),
        gone={member: why for member, why in gone.items() if member in members},
        donors=donors,
        tokens={member: joining[member] for member in donors},
        entry=entry or 0,
        error=error,
    )


def _entry(here: Sequence[Arrival]) -> int | None:
    """Return the step that a worker can begin with and make the same calls as the others.

    It comes from its own beginning right before the update of a step. So it makes no call that
    comes before that update, and all calls after it. Where the first of the others waits before an
    update, too, all calls up to there are made. Where it is right behind one, a worker that joins
    begins one step earlier. Where it is in a call that others have yet to make, there is no step.
    """
    last = max(arrival.step for arrival in here)
    first = [arrival for arrival in here if arrival.step == last]
    if any(arrival.call == STEP for arrival in first):
        return last
    return last - 1 if all(arrival.updated for arrival in first) else None


def _donor(here: Sequence[Arrival], joiner: int) -> int:
    """Return the member that a joiner gets everything from: the one before it that is ahead.

    Not one in a collective call, whose parameters may be the average of all.
    """
    last = max(arrival.step for arrival in here)
    ahead = [
        arrival.member
        for arrival in here
        if arrival.step == last and (arrival.call == STEP or arrival.updated)
    ]
    return max((member for member in ahead if member < joiner), default=ahead[-1])


def _arrivals(log: Sequence[Mapping[str, Any]]) -> dict[int, Arrival]:
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


def _apart(here: Sequence[Arrival]) -> tuple[Arrival, Arrival] | None:
    """Return a member that waits in a call, and one that is past it."""
    pairs = ((one, other) for one in here for other in here if _has_passed(other, one))
    return next(pairs, None)


def _odd_one(here: Sequence[Arrival]) -> int | None:
    """Return who must go where one that came later makes other calls than the others."""
    late = [arrival.member for arrival in _apart(here) or () if arrival.came_later]
    return late[-1] if late else None


def _error_of_program(here: Sequence[Arrival]) -> str:
    """Say why nobody is gone, and yet they waited in vain: not all make the same calls."""
    apart = _apart(here)
    if apart is None:
        return ""
    one, other = apart
    return (
        "all workers must make the same calls, and all are there, but they waited for each other "
        f"in vain: worker {one.member} called {one.call} at step {one.step}, and worker "
        f"{other.member} was in {other.call or 'optimizer.step()'} at step {other.step}; every "
        "worker must make this call, put the `if` inside"
    )


def _has_passed(other: Arrival, one: Arrival) -> bool:
    """Whether a member went past the place where another waits for it in a collective call."""
    if one.call in ("", STEP) or other.calls_done != one.calls_done or other.call == one.call:
        return False
    in_another_call = other.call not in ("", STEP)
    return in_another_call or other.step + (other.call == STEP) > one.step


def _unreachable(here: Sequence[Arrival]) -> int | None:
    """Return who must go where two members are there and could not connect."""
    present = {arrival.member for arrival in here}
    pairs = [
        max(arrival.member, peer)
        for arrival in here
        if not arrival.opened
        for peer in arrival.waited_for
        if len(arrival.waited_for) == 1 and peer in present
    ]
    return max(pairs, default=None)
