"""The members of each epoch, agreed on through a store that no worker holds.

Note [Epochs]
The members of an epoch are fixed. A member that detects a failure first appends an ``alive`` record
to the epoch's log, and only then closes its connections. The other members see the closed
connections, or poll the log, and do the same. This order matters: a closed connection to a member
without an ``alive`` record means that the member is lost. When the training thread of a member
notices the failure, it appends an ``Arrival`` with all that it knows. Once every member has arrived
or counts as lost, any of them proposes the next epoch; the store keeps the first proposal, which is
the decision. Only workers that have arrived, or asked to join, become members of the next epoch, so
no member waits for one that does not know of it; a worker that was stalled finds a decision without
it.

A worker that joins later appends its request under another key. Members poll for requests, and the
first member that reaches a step while no other is ahead of it in a collective call ends the epoch,
as if a member were lost. The worker is a member of the next epoch: it receives the state of a
*donor*, and takes its first step with the others. The records of an epoch are deleted when the
second epoch after it begins.

A worker without access to the store cannot be a member: if the network is partitioned, the side
with the store continues.
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
from gossamer.gossip.proposal import NO_DONOR, READY_S, SilenceClock, propose

_ANSWER_S = 4.0
"""How long a member may be silent, or half the timeout: its thread answers while it computes."""

_SEEN_S = 10.0
"""How long members may take to see a request to join, which their threads poll for."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
"""Between two polls while members agree."""

_MAX_RETRIES = 3
"""How often members retry a step with nobody lost, and a joiner that was admitted and could not
connect asks again, before it is an error."""


@final
class Membership:
    """One worker's part in the agreement; see Note [Epochs].

    Args:
        store: a part of it that no other gossip uses.
        member: this worker's number, which never changes.
        members: of the first epoch; none if this worker joins a running job.
        timeout: how long a member may compute before it has to arrive.
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
        self._num_retries = self._num_refused = 0
        self._token = secrets.token_hex(8)
        self._is_asking = False
        if self.members:
            self._log.begin(self.members, self._timeout_s)

    @property
    def epoch(self) -> int:
        """The epoch that this worker is in, or asks to join."""
        return self._log.epoch

    # - While training

    def watch(self, on_alarm: Callable[[str], None]) -> None:
        """Poll for failures that other members announce, from a thread.

        Args:
            on_alarm: called on that thread with the reason; it must ``announce``.
        """
        self._watcher.watch(on_alarm, len(self.members))

    @property
    def has_request(self) -> bool:
        """Whether a worker asks to join, and the next step should end the epoch."""
        return self._watcher.has_request

    def announce(self, epoch: int) -> None:
        """Write that the epoch has failed, and that this worker is alive."""
        self._watcher.announce(epoch)

    def heard(self, epoch: int, members: Sequence[int]) -> set[int]:
        """Return the ranks that have announced the failure of an epoch.

        All of them if the store does not answer: nobody may count as lost because of that.
        """
        try:
            log = self._log.records("log", epoch)
        except RuntimeError:
            return {*range(len(members))}
        alive = {record["alive"] for record in log if "alive" in record}
        return {rank for rank, member in enumerate(members) if member in alive}

    # - After a failure

    def arrive(self, arrival: Arrival) -> None:
        """Ask to be a member of the next epoch."""
        self._watcher.note_arrival()
        self._arrival = arrival
        self._log.append("log", here=asdict(arrival))

    def agree(self) -> Decision:
        """Block until the next epoch is decided, and enter it.

        Raises:
            ExchangeError: this worker is not a member of it, or the store does not answer.
        """
        decision = self._await_decision()
        if decision.error:
            raise ExchangeError(decision.error)
        # A worker that was stalled for long may find an old decision, or make one by itself because
        # the records were deleted. Both are void once the epoch after this one has ended.
        is_past = self._log.current()[0] > self.epoch + 1
        is_out = is_past or self.member not in decision.members
        if self._arrival is not None and self._arrival.joins:
            if is_out:
                return self._join_again(self._arrival, decision)
        elif is_out or self.member in decision.donors:
            why = decision.gone.get(self.member, "it was too late")
            raise ExchangeError(
                f"a member must answer in time, and the others went on without worker "
                f"{self.member} at step {decision.step}: {why}; end this process and restart it, "
                "so that it joins again (`gossamer launch` does). If workers compute for longer "
                "than that, raise timeout=",
                self.member,
            )
        self._check_progress(decision)
        self._enter(decision)
        return decision

    def _await_decision(self) -> Decision:
        """Poll for a decision; propose one as soon as every member has arrived or is lost."""
        clock = SilenceClock(self._timeout_s, self._answer_s)
        pause_s = _FIRST_PAUSE_S
        while (decision := self._log.decision()) is None:
            log, left, asked = self._log.read()
            clock.update(log)
            proposal = propose(self.members, log, left, asked, clock)
            if proposal is not None and proposal.error == NO_DONOR:
                # Only a joiner proposes this. It must not become the decision: a member with
                # parameters may only be slow, and would then have to end.
                raise ExchangeError(NO_DONOR)
            if proposal is not None:
                self._log.decide(proposal)
                continue
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return decision

    def _enter(self, decision: Decision) -> None:
        # The connections of the next epoch do not exist yet, so there are none to close.
        self._watcher.ignore_alarms()
        self._is_asking = False
        self._log.advance(self.members, decision.members)
        self.members = decision.members

    def _check_progress(self, decision: Decision) -> None:
        """Raise if epochs keep failing at one step, on all members: they see the same decisions."""
        before, self._last = self._last, decision
        ended_at = None if before is None else (before.members, before.step)
        repeats = ended_at == (decision.members, decision.step)
        self._num_retries = self._num_retries + 1 if repeats else 0
        if self._num_retries >= _MAX_RETRIES:
            raise ExchangeError(
                f"members must get past step {decision.step}, and failed "
                f"{self._num_retries + 1} times with nobody lost; check the first warning, and "
                f"what each of {decision.members} waited for"
            )

    def missing(self) -> list[int]:
        """Return the ranks of members that do not enter the epoch that was decided.

        All of them were waiting for the decision, so one that does not react at once is lost.
        """
        self._log.append("ready", ready=self.member)
        deadline = time.monotonic() + READY_S
        pause_s = _FIRST_PAUSE_S
        while True:
            ready = {record["ready"] for record in self._log.records("ready")}
            missing = [rank for rank, member in enumerate(self.members) if member not in ready]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    # - When this worker joins a running job

    def join(self, arrival: Arrival) -> Decision:
        """Ask to join, epoch after epoch, until this worker is a member; enter that epoch.

        Raises:
            ExchangeError: nobody answers in time, or training has ended.
        """
        deadline = time.monotonic() + 2 * self._timeout_s + _SEEN_S
        pause_s = _FIRST_PAUSE_S
        arrival, self._is_asking = replace(arrival, token=self._token), True
        self.members = ()  # not a member yet, even if a worker with its number is
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
                continue  # the epoch was over before this worker asked
            if decision.tokens.get(self.member) == arrival.token:
                self._enter(decision)
                return decision
            if self.member in decision.members:
                raise ExchangeError(
                    f"a worker joins once, and worker {self.member} is a member already, of "
                    f"{decision.members}; start the new one with a number of its own"
                )

    def _check_answer(self, members: tuple[int, ...], asked_at: float, deadline: float) -> None:
        """Raise if nobody will admit this worker."""
        left = {record["left"]: record["why"] for record in self._log.read()[1]}
        decision = self._log.decision()
        waited_s = time.monotonic() - asked_at
        if decision is not None and decision.error:
            reason = f"they have ended: {decision.error}"
        elif all(member in left for member in members):
            reason = f"they have ended: worker {members[0]} {left[members[0]]}"
        elif waited_s > _SEEN_S and not self._log.is_seen():
            reason = f"none of them has seen that within {_SEEN_S:g} s: they are gone or stalled"
        elif time.monotonic() > deadline:
            reason = f"none of them reached a step within {waited_s:.0f} s"
        else:
            return
        raise ExchangeError(f"worker {self.member} asked to join workers {members}, and {reason}")

    def _join_again(self, arrival: Arrival, decision: Decision) -> Decision:
        """Ask again, after this worker was admitted and could not connect."""
        self._num_refused += 1
        if self._num_refused > _MAX_RETRIES:
            raise ExchangeError(
                f"a worker that joins must reach all members, and worker {self.member} was "
                f"admitted {self._num_refused} times and could not connect to all of "
                f"{decision.members}: {arrival.why}; check whether its network reaches more than "
                "the store"
            )
        return self.join(replace(arrival, closed=(), waited_for=()))

    # - At the end

    def leave(self, why: str, *, alarm: bool) -> None:
        """Write that this worker is no longer a member.

        Args:
            why: the reason that the others log.
            alarm: whether they may be waiting for it, and the epoch has to end at once.
        """
        self._watcher.end()
        if self._is_asking:  # it is not a member, so nobody waits for it
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
        """Delete the records of past epochs from the store.

        No member reads them: all have entered the current epoch. ``agree`` handles a worker that
        was stalled meanwhile.
        """
        self._log.discard_past()
