"""The epoch that a gossip is in, and how it comes to the next: a worker is lost, or joins."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import final

from torch.distributed import (
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.distributed_c10d import PrefixStore

from gossamer.gossip.donation import Donation
from gossamer.gossip.epoch import Epoch, EpochMaker
from gossamer.gossip.epoch_log import Arrival, Decision, clone
from gossamer.gossip.failures import ExchangeError, FailureDetector
from gossamer.gossip.membership import Membership
from gossamer.gossip.network import Network, num_parts
from gossamer.gossip.notices import NoticeBoard, describe
from gossamer.gossip.replica import Replica
from gossamer.gossip.telemetry import Telemetry

_log = logging.getLogger(__name__)


@final
class Epochs:
    """Owns the current epoch; everything else asks here for what depends on members.

    Args:
        maker: makes epochs.
        replica: this worker's parameters, which go on from epoch to epoch.
        membership: agrees on members; None where a failure is raised, and there is one epoch only.
        store: where members of later epochs find each other.
        donation: what a worker that joins gets from another.
        timeout: how long a message may take.
    """

    current: Epoch

    def __init__(
        self,
        maker: EpochMaker,
        replica: Replica,
        membership: Membership | None,
        store: Store,
        donation: Donation,
        timeout: timedelta,
    ) -> None:
        self.calls_done = 0
        """Collective calls that this worker has done its part of."""
        self._maker = maker
        self._replica = replica
        self._membership = membership
        self._store = store
        self._donation = donation
        self._timeout = timeout
        self._telemetry = Telemetry()
        self._has_begun = self._came_later = False
        self._dropped: list[Network] = []

    def begin(self, first: Epoch) -> None:
        """Take the epoch in which all workers start together."""
        self.current, self._has_begun = first, True
        self._telemetry = first.network.telemetry
        if self._membership is not None:
            self._membership.watch(first.network.detector.alarm)

    def join(self) -> Decision:
        """Become a member of an epoch that begins later, with all that a donor has."""
        assert self._membership is not None, "there is nobody to join"
        self._came_later = True
        error = ExchangeError("this worker comes later", lost=True)
        try:
            return self._open_next(self._membership, error, None)
        except BaseException as failed:
            self._membership.leave(f"could not join: {describe(failed)}", alarm=True)
            raise

    @property
    def survives(self) -> bool:
        """Whether training goes on when a worker is lost."""
        return self._membership is not None

    def admit(self) -> None:
        """Come before the update of a step: end this epoch where a worker asks to join.

        Not where another member is in a call that this one has yet to make, and that a worker which
        joins would not.
        """
        if self._membership is not None and self._membership.is_asked:
            detector = self.current.network.detector
            if detector.has_made_all_calls():
                detector.alarm("a worker asks to join")
                detector.raise_failure()

    def takes(self, error: ExchangeError) -> bool:
        """Return whether others can go on after an error: a worker was lost, and that is asked."""
        return self.survives and error.lost

    def advance(
        self, error: ExchangeError, step: int, call: str, *, updated: bool = False
    ) -> Decision:
        """Open the next epoch, with those who are left and who join; return how it began.

        Args:
            error: what has ended this one.
            step: the step that this worker takes next, or is in before its update.
            call: the collective call that it is in.
            updated: whether it is right behind the update of a step.

        Raises:
            ExchangeError: it began without this worker, or cannot begin.
        """
        membership = self._membership
        assert membership is not None, "a failure is raised"
        left = self.current
        left.drop()
        self._dropped = [n for n in (*self._dropped, left.network) if not n.wait_dropped(0)]
        arrival = Arrival(
            member=membership.member,
            step=step,
            why="",
            call=call,
            calls_done=self.calls_done,
            updated=updated,
            came_later=self._came_later,
        )
        return self._open_next(membership, error, arrival)

    def _open_next(
        self, membership: Membership, error: ExchangeError, arrival: Arrival | None
    ) -> Decision:
        """Agree on an epoch and open it; on others where that fails."""
        began = time.monotonic()
        detector = None if arrival is None else self.current.network.detector
        arrival = arrival or Arrival(member=membership.member, step=0, why="", joins=True)
        opened = True
        while True:
            if detector is None:
                decision = membership.join(arrival)
            else:
                membership.arrive(_seen(arrival, membership.members, error, detector, opened))
                decision = membership.agree()
            group = self._group(membership)
            detector, opened = self._detector(membership, group), False
            try:
                self.current = self._open(decision, group, detector, membership)
                break
            except ExchangeError as again:
                detector.end()
                if not again.lost:
                    raise
                error = without_frames(again)
        self._say(membership, decision, error, time.monotonic() - began)
        if self.current.network.rank == 0:
            membership.discard_past()
        return decision

    def _group(self, membership: Membership) -> ProcessGroup:
        """Return the members of the epoch that was decided, and where they find each other."""
        # A connection of its own: a thread of the epoch before may still wait on that one's.
        store = PrefixStore(f"epoch/{membership.epoch}", clone(self._store))
        rank = membership.members.index(membership.member)
        return ProcessGroup(store, rank, len(membership.members))

    def _detector(self, membership: Membership, group: ProcessGroup) -> FailureDetector:
        """Return what notices the failures of that epoch."""
        announce = partial(membership.announce, membership.epoch)
        heard = partial(membership.heard, membership.epoch, membership.members)
        detector = FailureDetector(NoticeBoard(group, self._timeout), announce, heard)
        detector.watch()
        membership.watch(detector.alarm)
        return detector

    def _open(
        self,
        decision: Decision,
        group: ProcessGroup,
        detector: FailureDetector,
        membership: Membership,
    ) -> Epoch:
        if missing := membership.missing():
            detector.closed_peers.update(missing)
            raise ExchangeError("a member was lost while others agreed", lost=True)
        rules = self._maker.rules.or_fallback(len(decision.members))
        network = self._maker.connect(group, detector, rules, self._telemetry)
        try:
            self._hand_over(decision, network, membership.member)
        except BaseException:
            network.drop()
            raise
        schedule = rules.schedule(len(decision.members))
        return self._maker.make(
            network, self._replica, schedule, decision.members, first_step=decision.step
        )

    def _hand_over(self, decision: Decision, network: Network, member: int) -> None:
        """Give those who join what they need, or get it, one after the other.

        All members meet after every part, so that each of these may take as long as a message:
        whoever trained on meanwhile would wait for all of them together.
        """
        ranks = {each: rank for rank, each in enumerate(decision.members)}
        for joiner, donor in decision.donors.items():
            what = f"worker {joiner} to get what it joins with"

            def meet(value: int = 0, what: str = what) -> list[int]:
                return network.collectives.begin_gather(value, what)()

            data = self._donation.pack() if member == donor else b""
            num_bytes = meet(len(data))[ranks[donor]]
            if member == donor:
                network.send(data, ranks[joiner], meet)
            elif member == joiner:
                self._donation.load(network.receive(ranks[donor], meet))
                self.calls_done = decision.calls_done
            else:
                for _ in range(num_parts(num_bytes)):
                    meet()

    def _say(
        self, membership: Membership, decision: Decision, error: ExchangeError, took_s: float
    ) -> None:
        network = self.current.network
        network.telemetry.failures += bool(decision.gone and self._has_begun)
        self._has_begun = True
        network.telemetry.joins += bool(decision.donors)
        network.telemetry.recovery_s += took_s
        changes = [
            *(f"without worker {worker}, {why}" for worker, why in decision.gone.items()),
            *(f"worker {a} joins with the state of {b}" for a, b in decision.donors.items()),
        ]
        _log.warning(
            "worker %d goes on at step %d as rank %d of %d, after %.2f s: %s (%s)",
            membership.member,
            decision.step,
            network.rank,
            network.size,
            took_s,
            "; ".join(changes) or "nobody is gone",
            error,
        )

    def come_together(self) -> None:
        """Let all steps be mixed from now on: all members have loaded the same one."""
        self.current = replace(self.current, first_step=0)
        self.current.context.first_mixed = 0

    def leave(self, why: str, *, alarm: bool) -> None:
        """Tell the others that this worker takes part no more.

        Args:
            why: what they will say of it.
            alarm: whether they wait for it.
        """
        if self._membership is not None:
            self._membership.leave(why, alarm=alarm)

    def wait_dropped(self, seconds: float) -> bool:
        """Return whether nothing waits on connections that were let go of, within a time."""
        deadline = time.monotonic() + seconds
        networks = [*self._dropped, self.current.network]
        return all([network.wait_dropped(deadline - time.monotonic()) for network in networks])


def _seen(
    arrival: Arrival,
    members: tuple[int, ...],
    error: ExchangeError,
    detector: FailureDetector,
    opened: bool,
) -> Arrival:
    """Return what the others are told; of an epoch that was open, or was to be."""
    return replace(
        arrival,
        why=str(error),
        opened=opened,
        timed_out=error.timed_out,
        closed=tuple(members[rank] for rank in sorted(detector.closed_peers)),
        waited_for=() if error.culprit is None else (members[error.culprit],),
    )


def without_frames(error: ExchangeError) -> ExchangeError:
    """Return an error that refers to nothing: connections close with the last reference to them."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
