"""The current epoch of a gossip, and the change to the next when a worker is lost or joins.

Connections close with the last reference to them, which frees members that wait on them. An error
that is kept across an epoch must therefore refer to no frame: see ``without_frames``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
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
from gossamer.gossip.store_query import query
from gossamer.gossip.telemetry import Telemetry

_log = logging.getLogger(__name__)

_SPARE_S = 0.5
"""How long a recovery may wait for the connection that was opened ahead, and for its answer."""


@final
class Epochs:
    """Owns the current epoch; all that depends on the members is reached through it.

    Args:
        maker: builds epochs.
        replica: this worker's parameters, which stay from epoch to epoch.
        membership: agrees on members; None if failures are raised, so that there is one epoch only.
        store: where members of later epochs rendezvous.
        donation: packs and loads the state that a worker joins with.
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
        self._next_store = _NextStore(store)
        self._donation = donation
        self._timeout = timeout
        self._telemetry = Telemetry()
        self._has_begun = self._came_later = False
        self._dropped: list[Network] = []

    def begin(self, first: Epoch) -> None:
        """Enter the first epoch, in which all workers start together."""
        self.current, self._has_begun = first, True
        self._telemetry = first.network.telemetry
        if self._membership is not None:
            self._membership.watch(first.network.detector.alarm)
            self._next_store.open()

    def join(self) -> Decision:
        """Become a member of a running job, with the state of a donor."""
        assert self._membership is not None, "on_failure is 'raise'"
        self._came_later = True
        error = ExchangeError("this worker joins a running job", lost=True)
        try:
            return self._open_next(self._membership, error, None)
        except BaseException as failed:
            self._membership.leave(f"could not join: {describe(failed)}", alarm=True)
            raise

    @property
    def survives(self) -> bool:
        """Whether training continues when a worker is lost."""
        return self._membership is not None

    def admit(self) -> None:
        """End this epoch if a worker asks to join; called before the update of a step.

        Not while another member is in a collective call that this one has yet to make: the worker
        would not make that call, so there is no step that it could begin with.
        """
        if self._membership is not None and self._membership.has_request:
            detector = self.current.network.detector
            if detector.has_made_all_calls():
                detector.alarm("a worker asks to join")
                detector.raise_failure()

    def takes(self, error: ExchangeError) -> bool:
        """Return whether this gossip recovers from an error: a worker was lost, and it survives."""
        return self.survives and error.lost

    def advance(
        self, error: ExchangeError, step: int, call: str, *, updated: bool = False
    ) -> Decision:
        """Open the next epoch, with the survivors and the workers that join; return its decision.

        Args:
            error: what ended this epoch.
            step: this worker's next step, or the one that it is in before the update.
            call: the collective call that it is in.
            updated: whether it has just updated its parameters.

        Raises:
            ExchangeError: this worker is not a member of it, or it cannot begin.
        """
        membership = self._membership
        assert membership is not None, "on_failure is 'raise'"
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
        """Agree on an epoch and open it; if a member is lost meanwhile, on the one after it."""
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
            except ExchangeError as failed:
                detector.end()
                if not failed.lost:
                    raise
                error = without_frames(failed)
        self._report(membership, decision, error, time.monotonic() - began)
        if self.current.network.rank == 0:
            membership.discard_past()
        self._next_store.open()
        return decision

    def _group(self, membership: Membership) -> ProcessGroup:
        """Return the process group of the epoch that was decided, on its own part of the store."""
        store = PrefixStore(f"epoch/{membership.epoch}", self._next_store.take())
        rank = membership.members.index(membership.member)
        return ProcessGroup(store, rank, len(membership.members))

    def _detector(self, membership: Membership, group: ProcessGroup) -> FailureDetector:
        """Return the failure detector of the epoch that was decided."""
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
            raise ExchangeError("a member was lost during the agreement", lost=True)
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
        """Send the donors' state to the workers that join, one after the other.

        All members take part in a collective after every part of it. Otherwise members that neither
        send nor receive would wait at their next exchange for all parts together, and time out.
        """
        ranks = {each: rank for rank, each in enumerate(decision.members)}
        for joiner, donor in decision.donors.items():
            what = f"worker {joiner} to receive its donor's state"

            def sync(value: int = 0, what: str = what) -> list[int]:
                return network.collectives.begin_gather(value, what)()

            data = self._donation.pack() if member == donor else b""
            num_bytes = sync(len(data))[ranks[donor]]
            if member == donor:
                network.send(data, ranks[joiner], sync)
            elif member == joiner:
                self._donation.load(network.receive(ranks[donor], sync))
                self.calls_done = decision.calls_done
            else:
                for _ in range(num_parts(num_bytes)):
                    sync()

    def _report(
        self, membership: Membership, decision: Decision, error: ExchangeError, took_s: float
    ) -> None:
        network = self.current.network
        network.telemetry.failures += bool(decision.gone and self._has_begun)
        self._has_begun = True
        network.telemetry.joins += bool(decision.donors)
        network.telemetry.recovery_s += took_s
        changes = [
            *(f"without worker {worker}, {why}" for worker, why in decision.gone.items()),
            *(f"worker {a} joins with the state of worker {b}" for a, b in decision.donors.items()),
        ]
        _log.warning(
            "worker %d continues at step %d as rank %d of %d, after %.2f s: %s (%s)",
            membership.member,
            decision.step,
            network.rank,
            network.size,
            took_s,
            "; ".join(changes) or "nobody is lost",
            error,
        )

    def come_together(self) -> None:
        """Mix in every step from now on: all members have loaded a state of the same step."""
        self.current = replace(self.current, first_step=0)
        self.current.context.first_mixed = 0

    def leave(self, why: str, *, alarm: bool) -> None:
        """Tell the other members that this worker leaves.

        Args:
            why: the reason that they log.
            alarm: whether they may be waiting for it.
        """
        if self._membership is not None:
            self._membership.leave(why, alarm=alarm)

    def wait_dropped(self, seconds: float) -> bool:
        """Wait until no thread blocks on dropped connections; return False if time runs out."""
        deadline = time.monotonic() + seconds
        networks = [*self._dropped, self.current.network]
        idle = [network.wait_dropped(deadline - time.monotonic()) for network in networks]
        return self._next_store.wait(deadline - time.monotonic()) and all(idle)


@final
class _NextStore:
    """The connection to the store that the next epoch will use, opened before it is needed.

    Each epoch has its own, because a thread of the epoch before may still block on that one's. Both
    ends look up each other's host name when they connect, which takes seconds if a resolver does
    not answer: in the middle of a recovery, this worker would count as lost.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._opened: list[Store] = []
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Connect in the background."""
        self._thread = threading.Thread(target=self._connect, name="gossamer-store", daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        with contextlib.suppress(RuntimeError):  # of the store; take() tries again
            self._opened.append(clone(self._store))

    def wait(self, seconds: float) -> bool:
        """Wait until no thread connects: one that is woken at exit would abort the process."""
        if self._thread is not None:
            self._thread.join(max(seconds, 0.0))
        return self._thread is None or not self._thread.is_alive()

    def take(self) -> Store:
        """Return a connection that nothing else uses, a new one if that of before is broken."""
        if self.wait(_SPARE_S) and self._opened and _answers(spare := self._opened.pop()):
            return spare
        return clone(self._store)


def _answers(store: Store) -> bool:
    """Return whether a connection that may have been idle for hours still works."""
    try:
        query(lambda: store.check(["any"])).result(_SPARE_S)
    except (RuntimeError, TimeoutError):
        return False
    return True


def _seen(
    arrival: Arrival,
    members: tuple[int, ...],
    error: ExchangeError,
    detector: FailureDetector,
    opened: bool,
) -> Arrival:
    """Return an arrival with what this worker detected, in an epoch that was open or opening."""
    return replace(
        arrival,
        why=str(error),
        opened=opened,
        timed_out=error.timed_out,
        closed=tuple(members[rank] for rank in sorted(detector.closed_peers)),
        waited_for=() if error.culprit is None else (members[error.culprit],),
    )


def without_frames(error: ExchangeError) -> ExchangeError:
    """Return an error without tracebacks, whose frames would keep connections from closing."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
