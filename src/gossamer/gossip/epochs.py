"""The epoch that a gossip is in, and how it comes to the next one when a worker is lost."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import final

from torch.distributed import (
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.distributed_c10d import PrefixStore

from gossamer.gossip.epoch import Epoch, EpochMaker
from gossamer.gossip.failures import ExchangeError, FailureDetector
from gossamer.gossip.membership import Arrival, Decision, Membership, clone
from gossamer.gossip.network import Network
from gossamer.gossip.notices import NoticeBoard
from gossamer.gossip.replica import Replica

_log = logging.getLogger(__name__)


@final
class Epochs:
    """Owns the current epoch; everything else asks here for what depends on members.

    Args:
        first: the epoch that begins.
        maker: makes others.
        replica: this worker's parameters, which go on from epoch to epoch.
        membership: agrees on members; None where a failure is raised, and there is one epoch only.
        store: where members of later epochs find each other.
    """

    def __init__(
        self,
        first: Epoch,
        maker: EpochMaker,
        replica: Replica,
        membership: Membership | None,
        store: Store,
    ) -> None:
        self.current = first
        self.calls_done = 0
        """Collective calls that this worker has done its part of."""
        self._maker = maker
        self._replica = replica
        self._membership = membership
        self._store = store
        self._dropped: list[Network] = []
        if membership is not None:
            membership.watch(first.network.detector.alarm)

    @property
    def survives(self) -> bool:
        """Whether training goes on when a worker is lost."""
        return self._membership is not None

    def takes(self, error: ExchangeError) -> bool:
        """Return whether others can go on after an error: a worker was lost, and that is asked."""
        return self.survives and error.lost

    def advance(self, error: ExchangeError, step: int, call: str) -> Decision:
        """Open the next epoch, with those who are left; return how it began.

        Args:
            error: what has ended this one.
            step: the step that this worker takes next, or is in before its update.
            call: the collective call that it is in.

        Raises:
            ExchangeError: it began without this worker, or cannot begin.
        """
        membership = self._membership
        assert membership is not None, "a failure is raised"
        began = time.monotonic()
        left = self.current
        left.drop()
        self._dropped = [n for n in (*self._dropped, left.network) if not n.wait_dropped(0)]
        detector = left.network.detector
        while True:
            membership.arrive(self._arrival(membership, error, step, call, detector))
            decision = membership.agree()
            group = self._group(membership)
            detector = self._detector(membership, group)
            try:
                self.current = self._open(decision, group, detector, membership)
                break
            except ExchangeError as again:
                detector.end()
                if not again.lost:
                    raise
                error = without_frames(again)
        self._say(membership, decision, error, time.monotonic() - began)
        return decision

    def _arrival(
        self,
        membership: Membership,
        error: ExchangeError,
        step: int,
        call: str,
        detector: FailureDetector,
    ) -> Arrival:
        """Return what the others are told; of an epoch that was open, or was to be."""
        names = membership.members
        return Arrival(
            member=membership.member,
            step=step,
            why=str(error),
            call=call,
            calls_done=self.calls_done,
            opened=detector is self.current.network.detector,
            timed_out=error.timed_out,
            closed=tuple(names[rank] for rank in sorted(detector.closed_peers)),
            waited_for=() if error.culprit is None else (names[error.culprit],),
        )

    def _group(self, membership: Membership) -> ProcessGroup:
        """Return the members of the epoch that was decided, and where they find each other."""
        # A connection of its own: a thread of the epoch before may still wait on that one's.
        store = PrefixStore(f"epoch/{membership.epoch}", clone(self._store))
        rank = membership.members.index(membership.member)
        return ProcessGroup(store, rank, len(membership.members))

    def _detector(self, membership: Membership, group: ProcessGroup) -> FailureDetector:
        """Return what notices the failures of that epoch."""
        timeout = self.current.network.detector.timeout
        announce = partial(membership.announce, membership.epoch)
        detector = FailureDetector(NoticeBoard(group, timeout), announce)
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
        network = self._maker.connect(group, detector, rules, self.current.network.telemetry)
        schedule = rules.schedule(len(decision.members))
        return self._maker.make(
            network, self._replica, schedule, decision.members, first_step=decision.step
        )

    def _say(
        self, membership: Membership, decision: Decision, error: ExchangeError, took_s: float
    ) -> None:
        network = self.current.network
        network.telemetry.failures += 1
        network.telemetry.recovery_s += took_s
        _log.warning(
            "worker %d goes on at step %d as rank %d of %d, after %.2f s: %s (%s)",
            membership.member,
            decision.step,
            network.rank,
            network.size,
            took_s,
            "; ".join(f"without worker {worker}, {why}" for worker, why in decision.gone.items())
            or "nobody is gone",
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


def without_frames(error: ExchangeError) -> ExchangeError:
    """Return an error that refers to nothing: connections close with the last reference to them."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
