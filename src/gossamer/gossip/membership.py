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
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import final

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.gossip.epoch_log import Arrival, Decision, EpochLog
from gossamer.gossip.epoch_watcher import EpochWatcher
from gossamer.gossip.failures import ExchangeError
from gossamer.gossip.proposal import NOTHING_LEFT, READY_S, Listener, propose

_ANSWER_S = 4.0
"""How long others have, or half the timeout: their threads answer while they compute."""

_SEEN_S = 10.0
"""How long members have to see that a worker asks to join: their threads look now and then."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
"""Between two looks at the log of those that agree."""

_MOST_IN_VAIN = 3
"""Epochs in a row that end where they began, before what fails is taken for the program."""


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
        self.member = member
        self.members = tuple(members)
        self._timeout_s = timeout.total_seconds()
        self._answer_s = min(_ANSWER_S, self._timeout_s / 2)
        self._log = EpochLog(store, member, self._answer_s)
        self._watcher = EpochWatcher(self._log, member, self._answer_s)
        self._arrival: Arrival | None = None
        self._last: Decision | None = None
        self._num_in_vain = self._num_refused = 0
        self._token = secrets.token_hex(8)
        self._asks = False
        if self.members:
            self._log.begin(self.members)

    @property
    def epoch(self) -> int:
        """The epoch that this worker is in, or asks to join."""
        return self._log.epoch

    # - While all goes well

    def watch(self, on_alarm: Callable[[str], None]) -> None:
        """Begin to look for an alarm, from a thread, and to answer it.

        Args:
            on_alarm: called on that thread with what others have seen; it must ``announce``.
        """
        self._watcher.watch(on_alarm, len(self.members))

    @property
    def is_asked(self) -> bool:
        """Whether a worker asks to join, so that the next step should end the epoch."""
        return self._watcher.is_asked

    def announce(self, epoch: int) -> None:
        """Say that this worker is there, though the epoch has failed."""
        self._watcher.announce(epoch)

    def heard(self, epoch: int, members: Sequence[int]) -> set[int]:
        """Return the ranks of those who have said so; all, where the store does not answer."""
        try:
            log = self._log.lines("log", epoch)
        except RuntimeError:
            return {*range(len(members))}
        alive = {line["alive"] for line in log if "alive" in line}
        return {rank for rank, member in enumerate(members) if member in alive}

    # - When one is lost

    def arrive(self, arrival: Arrival) -> None:
        """Ask for the next epoch."""
        self._watcher.note_arrival()
        self._arrival = arrival
        self._log.append("log", here=asdict(arrival))

    def agree(self) -> Decision:
        """Return how the next epoch begins, when that is decided.

        Raises:
            ExchangeError: it begins without this worker, or the store does not answer.
        """
        decision = self._await_decision()
        if decision.error:
            raise ExchangeError(decision.error)
        # What a worker that was stalled finds, or decides by itself where it finds nothing, is of
        # no use when the epoch after that has ended, too.
        is_past = self._log.current()[0] > self.epoch + 1
        is_out = is_past or self.member not in decision.members
        if self._arrival is not None and self._arrival.joins:
            if is_out:
                return self._join_again(self._arrival, decision)
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

    def _await_decision(self) -> Decision:
        """Return what is decided; propose it as soon as one can tell."""
        listener = Listener(self._timeout_s, self._answer_s)
        pause_s = _FIRST_PAUSE_S
        while (decision := self._log.decision()) is None:
            log, left, asked = self._log.read()
            listener.hear(log)
            proposal = propose(self.members, log, left, asked, listener)
            if proposal is not None and proposal.error == NOTHING_LEFT:
                # Only one that joins proposes this, and it decides nothing for who has parameters.
                raise ExchangeError(NOTHING_LEFT)
            if proposal is not None:
                self._log.decide(proposal)
                continue
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return decision

    def _enter(self, decision: Decision) -> None:
        # Until there are connections to break off, nobody is to be told of an alarm.
        self._watcher.ignore_alarms()
        self._asks = False
        self._log.advance(self.members, decision.members)
        self.members = decision.members

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
        self._log.append("ready", ready=self.member)
        deadline = time.monotonic() + READY_S
        pause_s = _FIRST_PAUSE_S
        while True:
            ready = {line["ready"] for line in self._log.lines("ready")}
            missing = [rank for rank, member in enumerate(self.members) if member not in ready]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

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
            epoch, members = self._log.current()
            self._log.epoch = epoch
            self._log.append("asked", here=asdict(arrival))
            asked_at = time.monotonic()
            while (now := self._log.current()[0]) == epoch:
                self._check_answer(members, asked_at, deadline)
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            decision = self._log.decision()
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
        left = {line["left"]: line["why"] for line in self._log.read()[1]}
        decision = self._log.decision()
        waited_s = time.monotonic() - asked_at
        if decision is not None and decision.error:
            reason = f"they have ended: {decision.error}"
        elif all(member in left for member in members):
            reason = f"they have ended: worker {members[0]} {left[members[0]]}"
        elif waited_s > _SEEN_S and not self._log.is_seen():
            reason = f"none of them has seen that within {_SEEN_S:g} s: they are gone, or stalled"
        elif time.monotonic() > deadline:
            reason = f"none of them came to a step within {waited_s:.0f} s"
        else:
            return
        raise ExchangeError(f"worker {self.member} asked to join workers {members}, and {reason}")

    def _join_again(self, arrival: Arrival, decision: Decision) -> Decision:
        """Ask once more, where this worker was let in and could not connect."""
        self._num_refused += 1
        if self._num_refused > _MOST_IN_VAIN:
            raise ExchangeError(
                f"worker {self.member} was let in {self._num_refused} times, and must "
                f"reach all of {decision.members} itself, which failed: "
                f"{arrival.why}; look for a network that connects it with the store "
                "only"
            )
        return self.join(replace(arrival, closed=(), waited_for=()))

    # - The end

    def leave(self, why: str, *, alarm: bool) -> None:
        """Say that this worker takes part no more.

        Args:
            why: what the others will say of it.
            alarm: whether they wait for it, and must be told at once.
        """
        self._watcher.end()
        if self._asks:  # others have not waited for it
            with contextlib.suppress(RuntimeError):
                self._log.append("asked", withdraws=[self.member, self._token])
            return
        if self.member not in self.members:
            return
        with contextlib.suppress(RuntimeError):
            self._log.append("left", left=self.member, why=why)
            if alarm:
                self._log.append("log", alive=self.member)

    def discard_past(self) -> None:
        """Remove from the store what the epochs before the last one have left there.

        Nobody asks for it, because all members have been in that one; ``agree`` says what becomes
        of a worker that was stalled and has not.
        """
        self._log.discard_past()
