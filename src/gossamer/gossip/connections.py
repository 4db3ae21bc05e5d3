"""Process groups of our own, and the work that is begun on them.

They are made on the store of the group that is passed in, so what users send or reduce on theirs
can never be taken for ours. Ranks here are ranks within that group.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from functools import partial
from typing import cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)
from torch.distributed.distributed_c10d import PrefixStore

from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.gloo import Gloo
from gossamer.gossip.notices import name_ranks

_LOOK_EVERY_S = 1.0
"""How often a rank that waits for a connection looks whether others have failed."""

_SETTLE_S = 0.02
"""How often a rank that lets go of connections looks whether their other ends are closed."""

_CLOSING_S = 0.25
"""How long it looks, at most: of ranks that end at one moment, the last one's close later."""

_NEVER_SENT = 1 << 30
"""A tag that no message has."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Between two questions whether a peer has come."""


@final
class Connections:
    """Opens process groups for one rank, and explains the failures of work on them.

    Args:
        process_group: the ranks that take part; nothing is sent on it.
        detector: who explains what fails; its timeout is how long a message or all-reduce may take,
            from when it is begun.
        device: where the tensors live. CPU tensors travel over Gloo, others over the group's
            own backend.
        opening: how long ranks may take to connect, where that is less than the timeout.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        detector: FailureDetector,
        device: torch.device,
        *,
        opening: timedelta | None = None,
    ) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self.everyone = tuple(range(self.size))
        self.device = device
        self.on_cpu = device.type == "cpu"
        self.detector = detector
        self._base = process_group
        self._patience = opening or detector.timeout
        self._gloo = Gloo(detector.timeout)
        self._opened: list[ProcessGroup] = []
        self._dropping: threading.Thread | None = None
        detector.break_off = self.break_off
        self._lanes: dict[tuple[int, int], ProcessGroup] = {}

    def allow_computation(self) -> None:
        """Let waits take the whole timeout from now on: what ranks open at once is open."""
        self._patience = self.detector.timeout

    def open(self, members: tuple[int, ...], purpose: str) -> ProcessGroup:
        """Connect these ranks for collectives; waits for them, so all open in one order."""
        what, others = "connections", self.others_in(members)
        self.detector.awaits(what, others)
        with self.detector.blocked(), self._explained(what, others):
            # A backend by itself has the methods that we call.
            group = cast(ProcessGroup, self._make_group(members, purpose))
        self._opened.append(group)
        # Nobody may be met for the first time later; see gloo's Note [Lazy connections].
        wait = self.begin_sum(group, members, torch.zeros(1, device=self.device), what)
        with self.detector.blocked():
            wait()
        return group

    def _make_group(self, members: tuple[int, ...], purpose: str) -> object:
        if self.on_cpu:
            rank, size = members.index(self.rank), len(members)
            return self._gloo.group(self._store_of(purpose, members), rank, size)
        return dist.new_group(
            [dist.get_global_rank(self._base, member) for member in members],
            timeout=self.detector.timeout,
            backend=dist.get_backend(self._base),
            use_local_synchronization=True,
        )

    def open_lanes(self, lanes: frozenset[tuple[int, int]]) -> None:
        """Connect this rank with what it sends to and receives from; waits for the other ends.

        Args:
            lanes: sender and receiver of each. Both ends open one at the same place among their
                rounds; those of one round are opened in an order that all ranks share.
        """
        for lane in sorted(lanes - self._lanes.keys(), key=_turn):
            self._lanes[lane] = self._open_lane(*lane)

    def are_open(self, lanes: frozenset[tuple[int, int]]) -> bool:
        """Return whether all of these have been opened."""
        return lanes <= self._lanes.keys()

    def _open_lane(self, sender: int, receiver: int) -> ProcessGroup:
        peer = receiver if self.rank == sender else sender
        store = self._store_of("lane", (sender, receiver))
        what = f"a connection with rank {peer}"
        self.detector.awaits(what, (peer,))
        with self._explained(what, (peer,)):
            self._await_peer(store, peer)
            # Gloo asks for a message on the connection on which it then comes. If the asking rank
            # sent data there too, the request would wait behind them while the link from its peer
            # idles: a ring across two nodes took twice as long. So each goes one way only.
            direction = "upward" if sender < receiver else "downward"
            rank = int(self.rank == receiver)
            lane = self._gloo.lane(store, rank, direction, self._patience)
        return cast(ProcessGroup, lane)

    def _await_peer(self, store: Store, peer: int) -> None:
        """Return when the peer has come to connect; raise where it will not."""
        store.set(f"here/{self.rank}", "")
        began = looked = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        # By questions: while a store's own wait lasts, other threads cannot ask it anything.
        while not store.check([f"here/{peer}"]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - began > self._patience.total_seconds():
                raise RuntimeError("timed out")
            if self.detector.broken:
                raise RuntimeError("a rank has failed")
            if now - looked > _LOOK_EVERY_S:
                looked = now
                if not self.detector.board.will_come(peer):
                    raise RuntimeError("a rank has failed or ended")

    def lane(self, sender: int, receiver: int) -> ProcessGroup:
        """Return an open connection, on which the sender is rank 0 and the receiver rank 1."""
        group = self._lanes.get((sender, receiver))
        if group is None:
            self.detector.raise_failure()
            raise AssertionError(f"no connection from rank {sender} to {receiver}")
        return group

    def _store_of(self, purpose: str, members: tuple[int, ...]) -> Store:
        name = hashlib.blake2b(f"{purpose} {members}".encode(), digest_size=8).hexdigest()
        return PrefixStore(name, self.detector.board.store)

    @contextlib.contextmanager
    def _explained(self, what: str, peers: tuple[int, ...]) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.detector.failure(what, peers, error) from error

    def others_in(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return these ranks without this one."""
        return tuple(member for member in members if member != self.rank)

    def begin(
        self, work: Callable[[], Work], what: str, peers: tuple[int, ...]
    ) -> Callable[[], None]:
        """Begin a piece of work; return the function that waits for it."""
        with self._explained(what, peers):
            begun = work()
        return partial(self.wait, begun, what, peers)

    def begin_sum(
        self, group: ProcessGroup, members: tuple[int, ...], tensor: Tensor, what: str
    ) -> Callable[[], None]:
        """Begin to all-reduce a tensor; return the function that waits for it."""
        if len(members) == 1:
            return lambda: None
        if members != self.everyone:
            what = f"{what} over {name_ranks(members)}"
        return self.begin(lambda: group.allreduce([tensor]), what, self.others_in(members))

    def wait(self, work: Work, what: str, peers: tuple[int, ...]) -> None:
        """Wait for a piece of work; raise its failure with the cause."""
        self.detector.awaits(what, peers)
        with self._explained(what, peers):
            # On a device, waiting orders streams and must not block the host; there NCCL's own
            # watchdog keeps the time.
            work.wait(self._patience) if self.on_cpu else work.wait()

    def close(self) -> None:
        """Leave all groups; nothing may be in flight."""
        if not self.on_cpu:
            for group in self._opened:
                dist.destroy_process_group(group)
        self._opened.clear()
        self._lanes.clear()
        self._gloo.close()

    def break_off(self) -> None:
        """Let go of messages in flight, so that peers see at once that this rank has failed.

        From any thread. What waits here goes on to wait, until the other end is closed, too. A
        connection is kept until its peer has said that it is there, or its end is closed: nobody
        could tell afterwards that a peer which says nothing is gone.
        """
        lanes, self._lanes = self._lanes, {}
        self._gloo.close()
        deadline = time.monotonic() + _CLOSING_S
        while lanes and time.monotonic() < deadline:
            time.sleep(_SETTLE_S)
            heard = self.detector.heard()
            for lane in [*lanes]:
                peer = lane[lane[0] == self.rank]
                if _has_ended(lanes[lane], int(peer == lane[1])):
                    self.detector.closed_peers.add(peer)
                    del lanes[lane]
                elif peer in heard:
                    del lanes[lane]

    def drop(self) -> None:
        """Let go of everything, whatever is in flight.

        A lane closes when the last reference to it and to work on it is gone, and at once. A group
        ends with its work, which may wait for a rank that is stalled; so a thread waits for that.
        """
        self._lanes = {}
        self._gloo.close()
        # A reference cycle, which would keep the store's connection open; see Transport.close.
        self.detector.break_off = lambda: None
        if self._opened:
            groups, self._opened = self._opened, []
            thread = threading.Thread(target=groups.clear, name="gossamer-drop", daemon=True)
            self._dropping = thread
            thread.start()

    def wait_dropped(self, seconds: float) -> bool:
        """Return whether the work of all groups has ended, within a time."""
        if self._dropping is not None:
            self._dropping.join(max(seconds, 0.0))
        return self._dropping is None or not self._dropping.is_alive()

    def keep_until_exit(self) -> None:
        """Keep all connections until the process is gone, whatever the interpreter lets go of."""
        for kept in (self.detector.board.store, *self._opened, *self._lanes.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _has_ended(lane: ProcessGroup, peer: int) -> bool:
    """Return whether the other end of a connection is closed."""
    try:
        lane.recv([torch.empty(1)], peer, _NEVER_SENT)  # nobody sends it: only errors come at once
    except RuntimeError:
        return True
    return False


def _turn(lane: tuple[int, int]) -> tuple[int, int, tuple[int, int]]:
    """Return where a lane comes among those of a round.

    Any order without ties avoids a deadlock, since all ranks share it. By distance, and then every
    second stretch of that length, neighbours that share no rank connect side by side.
    """
    low, high = sorted(lane)
    distance = high - low
    return distance, low // distance % 2, lane
