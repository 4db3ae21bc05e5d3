"""Process groups of our own, and the work that is started on them.

They are created on the store of the user's group, so messages and reductions on the user's group
cannot be mistaken for ours. Ranks here are ranks within that group.
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

_FAILURE_POLL_S = 1.0
"""How often a rank that waits for a connection polls the store for failures of other ranks."""

_CLOSED_POLL_S = 0.02
"""How often a rank that closes connections polls whether their other ends are closed."""

_CLOSING_S = 0.25
"""How long it polls: of ranks that end at the same moment, the last one's ends close later."""

_NEVER_SENT = 1 << 30
"""A tag that no message has."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Between two polls of the store for a peer that is to connect."""


@final
class Connections:
    """Opens process groups for one rank, and raises failures of work on them with their cause.

    Args:
        process_group: the ranks to connect; nothing is sent on it.
        detector: finds the cause of a failure; its timeout is how long a message or all-reduce may
            take after it has been posted.
        device: the device of tensors. CPU tensors are sent over Gloo, others over the group's own
            backend.
        opening: how long ranks may take to connect, if less than the timeout.
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
        """Allow waits to take the full timeout from now on: peers compute between messages."""
        self._patience = self.detector.timeout

    def open(self, members: tuple[int, ...], purpose: str) -> ProcessGroup:
        """Connect these ranks for collectives. Blocks, so all must open groups in one order."""
        what, others = "connections", self.others_in(members)
        self.detector.awaits(what, others)
        with self.detector.blocked(), self._explained(what, others):
            # A ProcessGroupGloo is a backend, not a ProcessGroup, but has the methods used here.
            group = cast(ProcessGroup, self._make_group(members, purpose))
        self._opened.append(group)
        # A first collective connects all ranks now, and times out. A first connection later could
        # block beyond the timeout on a peer that has ended; see gloo's Note [Lazy connections].
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
        """Connect this rank to its senders and receivers; blocks until the other ends connect.

        Args:
            lanes: sender and receiver of each. Both ends must open a lane in the same round; the
                lanes of a round are opened in an order that all ranks share.
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
            # Gloo's receiver requests a message on the connection that it arrives on. If that
            # connection also carried data in the other direction, the request would queue behind
            # the data while the link from the peer idles: a ring across two nodes took twice as
            # long. So each lane carries data one way only.
            direction = "upward" if sender < receiver else "downward"
            rank = int(self.rank == receiver)
            lane = self._gloo.lane(store, rank, direction, self._patience)
        return cast(ProcessGroup, lane)

    def _await_peer(self, store: Store, peer: int) -> None:
        """Block until the peer is ready to connect; raise if it has failed or ended."""
        store.set(f"here/{self.rank}", "")
        began = looked = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        # By polling: while store.wait() blocks, other threads of this rank cannot use the store.
        while not store.check([f"here/{peer}"]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - began > self._patience.total_seconds():
                raise RuntimeError("timed out")
            if self.detector.broken:
                raise RuntimeError("a rank has failed")
            if now - looked > _FAILURE_POLL_S:
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
        """Start a piece of work; return the function that waits for it."""
        with self._explained(what, peers):
            begun = work()
        return partial(self.wait, begun, what, peers)

    def begin_sum(
        self, group: ProcessGroup, members: tuple[int, ...], tensor: Tensor, what: str
    ) -> Callable[[], None]:
        """Start to all-reduce a tensor; return the function that waits for it."""
        if len(members) == 1:
            return lambda: None
        if members != self.everyone:
            what = f"{what} over {name_ranks(members)}"
        return self.begin(lambda: group.allreduce([tensor]), what, self.others_in(members))

    def wait(self, work: Work, what: str, peers: tuple[int, ...]) -> None:
        """Wait for a piece of work; raise its failure with the cause."""
        self.detector.awaits(what, peers)
        with self._explained(what, peers):
            # On a device, wait() orders streams and must not block the host; NCCL's own watchdog
            # detects timeouts there.
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
        """Close connections with messages in flight, so that peers detect this failure at once.

        Callable from any thread. Waits on this rank continue until the other end is closed, too. A
        connection is kept until its peer has announced the failure as well, or has closed its end:
        that is the only evidence that a silent peer is gone.
        """
        lanes, self._lanes = self._lanes, {}
        self._gloo.close()
        deadline = time.monotonic() + _CLOSING_S
        while lanes and time.monotonic() < deadline:
            time.sleep(_CLOSED_POLL_S)
            heard = self.detector.heard()
            for lane in [*lanes]:
                peer = lane[lane[0] == self.rank]
                if _has_ended(lanes[lane], int(peer == lane[1])):
                    self.detector.closed_peers.add(peer)
                    del lanes[lane]
                elif peer in heard:
                    del lanes[lane]

    def drop(self) -> None:
        """Release all connections, whatever is in flight.

        A lane closes as soon as the last reference to it and to work on it is gone. A group closes
        when its work ends, which may wait for a rank that is stalled: a thread waits for that.
        """
        self._lanes = {}
        self._gloo.close()
        # A reference cycle, which would keep the store's connection open.
        self.detector.break_off = lambda: None
        if self._opened:
            groups, self._opened = self._opened, []
            thread = threading.Thread(target=groups.clear, name="gossamer-drop", daemon=True)
            self._dropping = thread
            thread.start()

    def wait_dropped(self, seconds: float) -> bool:
        """Wait until the work of all groups has ended; return whether it has before the timeout."""
        if self._dropping is not None:
            self._dropping.join(max(seconds, 0.0))
        return self._dropping is None or not self._dropping.is_alive()

    def keep_until_exit(self) -> None:
        """Keep all connections open until the process has exited, also in interpreter shutdown."""
        for kept in (self.detector.board.store, *self._opened, *self._lanes.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _has_ended(lane: ProcessGroup, peer: int) -> bool:
    """Return whether the other end of a connection is closed."""
    try:
        # Never received, as no message has this tag; on a closed connection posting it raises.
        lane.recv([torch.empty(1)], peer, _NEVER_SENT)
    except RuntimeError:
        return True
    return False


def _turn(lane: tuple[int, int]) -> tuple[int, int, tuple[int, int]]:
    """Return the sort key of a lane among those of a round.

    Any total order avoids a deadlock, since all ranks share it. By distance, and then alternating
    stretches of that length: so pairs that share no rank connect at the same time.
    """
    low, high = sorted(lane)
    distance = high - low
    return distance, low // distance % 2, lane
