"""Moving buckets between processes: messages and all-reduces on a private process group.

The group is our own, made on the store of the one that is passed in, so what users send or reduce
on theirs can never meet our messages. Ranks here are ranks within that group.

Note [No deadlock]
A round is begun bucket by bucket, in one order on all ranks, and beginning never waits: it posts
every send of the bucket and its first receive. What waits is the collecting of further receives,
one after the other into one spare tensor; it runs on a thread of its own, in the same order. Each
message that anybody waits for has therefore been posted, or will be by a rank that need not wait
for anything of this round before it posts. All-reduces run on groups whose members all begin them
in the same order. An exchange ends only when its sends have been taken, and a rank begins the next
round after that; Gloo delivers the messages of one pair and tag in the order in which they were
posted. So one step's message cannot be taken for another's.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import PrefixStore

from gossamer.gossip.bulletin import Bulletin, name_ranks
from gossamer.gossip.collector import Collector
from gossamer.topology import Round

_SHUTDOWN_S = 10.0
"""How long an interpreter may take to shut down."""

_SMALLEST_REDUCED = 3
"""Groups of two exchange one message each way: the same bytes as an all-reduce, in one trip."""


@final
class Exchange:
    """One bucket's exchange in flight.

    Args:
        self_weight: weight that the worker keeps on its own parameters.
        includes_self: whether the inbox will hold the whole mix, the worker's own part included,
            and not the mean of its neighbours.
        waits: what has to be waited for, in this order.
    """

    def __init__(
        self, self_weight: float, *, includes_self: bool, waits: Iterable[Callable[[], object]]
    ) -> None:
        self.self_weight = self_weight
        self.includes_self = includes_self
        self._waits = deque(waits)

    def wait(self) -> None:
        """Return when the inbox is filled and the source may change again."""
        while self._waits:
            self._waits[0]()
            self._waits.popleft()  # each only once: Gloo would wait for a second message


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part in a round."""

    self_weight: float
    senders: list[int]
    shares: list[float]
    """Weight of each sender in the mean of those up to it, so that a mean grows by ``lerp_``."""

    receivers: list[int]
    reduced_with: tuple[int, ...]
    """The ranks to average with by an all-reduce; empty where the round runs as messages."""


@final
class Transport:
    """Exchanges tensors with neighbours on behalf of one rank.

    Args:
        process_group: the ranks that take part; nothing is sent on it.
        bulletin: the group's store, and who explains what fails; its timeout is how long a message
            or all-reduce may take, from when it is begun.
        device: where the tensors live. CPU tensors travel over Gloo, others over the group's
            own backend.
        rounds: rounds whose groups get process groups of their own to all-reduce on, now. Others
            run as messages, except where all ranks form one group.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        bulletin: Bulletin,
        device: torch.device,
        *,
        rounds: Iterable[Round] = (),
    ) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self.bytes_sent = 0
        self.messages_sent = 0
        self.meeting_s = 0.0
        """Time spent waiting for what all ranks meet in."""
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._bulletin = bulletin
        # - Process groups, opened now and in one order on all ranks, because opening waits
        self._base = process_group
        self._opened: list[ProcessGroup] = []
        self._everyone = tuple(range(self.size))
        # Where all ranks meet has connections of its own: a call that one rank makes alone must
        # not be taken for its part in a round.
        self._meeting = self._open_group(self._everyone, "meeting")
        self._num_meetings = 0
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        for members in (self._everyone, *(self._group_in(round) for round in rounds)):
            reduced = len(members) >= _SMALLEST_REDUCED or members == self._everyone
            if reduced and members not in self._groups:
                self._groups[members] = self._open_group(members, "rounds")
        # Gloo asks for a message on the connection on which it then comes. If the asking rank sent
        # data there too, the request would wait behind them while the link from its peer idles: a
        # ring across two nodes took twice as long. So messages go one way only on each connection.
        self._upward = self._groups[self._everyone]
        self._downward = self._upward
        if self._on_cpu:
            self._downward = self._open_group(self._everyone, "downward")
        # - What each round means for this rank
        self._part_in = lru_cache(maxsize=256)(self._make_part)
        # - Further receives on the CPU; see Note [No deadlock]
        self._collector = Collector()
        self._spare: dict[torch.dtype, Tensor] = {}

    def begin(self, round: Round, source: Tensor, inbox: Tensor, tag: int) -> Exchange:
        """Start one bucket's part of a round; see Note [No deadlock].

        Args:
            round: who mixes with whom.
            source: what is sent; it must not change until the exchange has been waited for.
            inbox: receives the mean of the neighbours, weighted as in the round.
            tag: number of the bucket.
        """
        part = self._part_in(round)
        if not part.reduced_with:
            begin = self._begin_over_gloo if self._on_cpu else self._begin_over_nccl
            return begin(part, source, inbox, tag)
        # Dividing while copying leaves the mean where a sum would need another pass. By the size,
        # not times its rounded inverse: parameters would drift by that error, step after step.
        torch.div(source, len(part.reduced_with), out=inbox)
        group = self._groups[part.reduced_with]
        what = f"the average of bucket {tag}"
        self._count_sum(len(part.reduced_with), inbox)
        wait = self._begin_sum(group, part.reduced_with, inbox, what)
        return Exchange(part.self_weight, includes_self=True, waits=[wait])

    def wait_for(self, exchange: Exchange) -> None:
        """Return when the exchange's inbox is filled and its source may change again."""
        with self._bulletin.blocked():
            exchange.wait()

    def average(self, tensor: Tensor) -> Tensor:
        """Return the mean over all ranks; that of 16-bit numbers in 32 bits.

        All ranks must be known to be here: see ``meet``.
        """
        wide = tensor.float() if tensor.element_size() == 2 else tensor
        mean = wide / self.size
        self._count_sum(self.size, mean)
        self._meet_in(self._begin_sum(self._meeting, self._everyone, mean, "an average"))
        return mean

    def meet(self, call: str) -> None:
        """Return when all ranks have come to this call; raise where some came to another."""
        self.begin_gather(0, call)()

    def begin_gather(self, value: int, call: str) -> Callable[[], list[int]]:
        """Begin to collect a number from every rank; return the function that waits for them.

        Args:
            value: this rank's number.
            call: what the numbers are for. Ranks that gather for something else are an error.
        """
        self._bulletin.raise_failure()
        self._num_meetings += 1
        pairs = torch.zeros(self.size, 2, dtype=torch.int64, device=self._device)
        digest = hashlib.blake2b(f"{self._num_meetings} {call}".encode(), digest_size=7).digest()
        pairs[self.rank, 0] = int.from_bytes(digest)
        pairs[self.rank, 1] = value
        wait = self._begin_sum(self._meeting, self._everyone, pairs, f"all ranks to come to {call}")

        def collect() -> list[int]:
            self._meet_in(wait)
            if others := self._ranks_that_differ(pairs[:, 0].tolist()):
                raise self._bulletin.disagreement(
                    others,
                    f"all ranks must make the same calls in the same order, but rank {self.rank} "
                    f"is in {call}, and {self._bulletin.calls_of(others)}",
                )
            return pairs[:, 1].tolist()

        return collect

    def begin_gather_rows(self, row: Tensor, what: str) -> Callable[[], Tensor]:
        """Begin to collect a vector from every rank; return the function that waits for them all.

        Args:
            row: this rank's, [m]; of one size on all ranks.
            what: what the vectors are, for whoever asks why it failed.
        """
        self._bulletin.raise_failure()
        rows = [torch.empty_like(row) for _ in self._everyone]
        others = self._others_in(self._everyone)
        wait = self._post(lambda: self._meeting.allgather([rows], [row]), what, others)

        def collect() -> Tensor:
            self._meet_in(wait)
            return torch.stack(rows)

        return collect

    def begin_comparison(self, digest: str) -> Callable[[], None]:
        """Begin to compare rounds across ranks; return the function that raises a difference.

        Args:
            digest: of one round, or of all that a step mixes with.
        """
        collect = self.begin_gather(int(digest[:15], 16), "the comparison of rounds")

        def compare() -> None:
            if others := self._ranks_that_differ(collect()):
                raise self._bulletin.disagreement(
                    others,
                    f"all ranks must mix with the same round, but {name_ranks(others)} had another "
                    f"one than rank {self.rank}; they must depend on the step and on what all "
                    "ranks know",
                )

        return compare

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace the tensor by rank 0's."""
        received = tensor.detach().clone(memory_format=torch.contiguous_format)
        as_bytes = received.view(-1).view(torch.uint8)  # any dtype travels as bytes
        what = "what rank 0 broadcasts"
        others = self._others_in(self._everyone)
        wait = self._post(lambda: self._meeting.broadcast([as_bytes]), what, others)
        with self._bulletin.blocked():
            wait()
        tensor.detach().copy_(received)

    def close(self) -> None:
        """End the collecting thread and leave all groups; nothing may be in flight."""
        self._collector.end()
        self._part_in.cache_clear()
        self._spare.clear()
        if not self._on_cpu:
            for group in self._opened:
                dist.destroy_process_group(group)
        self._groups.clear()
        self._opened.clear()
        del self._meeting, self._upward, self._downward

    def abandon(self, seconds: float) -> None:
        """Let the process end, or go on without this transport, though peers have failed it.

        A thread that waits in Gloo would abort the process if it were woken while the interpreter
        shuts down: by its timeout, a peer's end, or that of its own group. So it gets time to be
        woken before, and all connections stay until the process is gone, whatever the interpreter
        lets go of.
        """
        left = self._bulletin.seconds_left
        self._collector.wait_idle(left + 1 if left < seconds + _SHUTDOWN_S else seconds)
        for kept in (self._bulletin.store, *self._opened):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def _begin_over_gloo(self, part: _Part, source: Tensor, inbox: Tensor, tag: int) -> Exchange:
        receives = [self._receive(inbox, sender, tag) for sender in part.senders[:1]]
        sends = [self._send(source, receiver, tag) for receiver in part.receivers]
        if len(part.senders) < 2:
            return _messages(part, [*receives, *sends])

        def collect() -> None:
            receives[0]()
            spare = self._spare_like(inbox)
            for sender, share in zip(part.senders[1:], part.shares[1:], strict=True):
                self._receive(spare, sender, tag)()
                inbox.lerp_(spare, share)

        return _messages(part, [self._collector.submit(collect).result, *sends])

    def _begin_over_nccl(self, part: _Part, source: Tensor, inbox: Tensor, tag: int) -> Exchange:
        # One batch per bucket, as NCCL requires, so each message gets a tensor of its own, and a
        # round of degree k holds k copies; waiting and mixing are ordered by the device's streams.
        inboxes = [inbox, *(torch.empty_like(inbox) for _ in part.senders[1:])]
        group = self._groups[self._everyone]
        operations = [
            *(_p2p(dist.irecv, t, s, group) for t, s in zip(inboxes, part.senders, strict=False)),
            *(_p2p(dist.isend, source, receiver, group) for receiver in part.receivers),
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        self._count(len(part.receivers), len(part.receivers) * source.nbytes)

        def collect() -> None:
            for work in works:
                self._wait(work, f"bucket {tag}", tuple(part.senders))
            for other, share in zip(inboxes[1:], part.shares[1:], strict=True):
                inbox.lerp_(other, share)

        return _messages(part, [collect])

    def _receive(self, target: Tensor, sender: int, tag: int) -> Callable[[], None]:
        group = self._lane(sender, self.rank)
        what = f"bucket {tag} from rank {sender}"
        return self._post(lambda: group.recv([target], sender, tag), what, (sender,))

    def _send(self, source: Tensor, receiver: int, tag: int) -> Callable[[], None]:
        group = self._lane(self.rank, receiver)
        self._count(1, source.nbytes)
        what = f"rank {receiver} to take bucket {tag}"
        return self._post(lambda: group.send([source], receiver, tag), what, (receiver,))

    def _lane(self, sender: int, receiver: int) -> ProcessGroup:
        return self._upward if sender < receiver else self._downward

    def _begin_sum(
        self, group: ProcessGroup, members: tuple[int, ...], tensor: Tensor, what: str
    ) -> Callable[[], None]:
        if len(members) == 1:
            return lambda: None
        if members != self._everyone:
            what = f"{what} over {name_ranks(members)}"
        others = self._others_in(members)
        return self._post(lambda: group.allreduce([tensor]), what, others)

    def _post(
        self, begin: Callable[[], Work], what: str, peers: tuple[int, ...]
    ) -> Callable[[], None]:
        """Begin a piece of work; return the function that waits for it."""
        try:
            work = begin()
        except RuntimeError as error:
            raise self._bulletin.failure(what, peers, error) from error
        return partial(self._wait, work, what, peers)

    def _wait(self, work: Work, what: str, peers: tuple[int, ...]) -> None:
        self._bulletin.awaits(what, peers)
        try:
            # On a device, waiting orders streams and must not block the host; there NCCL's own
            # watchdog keeps the time.
            work.wait(self._bulletin.timeout) if self._on_cpu else work.wait()
        except RuntimeError as error:
            raise self._bulletin.failure(what, peers, error) from error

    def _meet_in(self, wait: Callable[[], None]) -> None:
        """Wait for all ranks, and add the time of it to ``meeting_s``."""
        began = time.perf_counter()
        with self._bulletin.blocked():
            wait()
        self.meeting_s += time.perf_counter() - began

    def _ranks_that_differ(self, digests: list[int]) -> list[int]:
        return [rank for rank, digest in enumerate(digests) if digest != digests[self.rank]]

    def _others_in(self, members: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(member for member in members if member != self.rank)

    def _count(self, messages: int, num_bytes: int) -> None:
        self.messages_sent += messages
        self.bytes_sent += num_bytes

    def _count_sum(self, size: int, tensor: Tensor) -> None:
        """Count a ring all-reduce; numbers that ranks gather are not counted."""
        self._count(2 * (size - 1), 2 * (size - 1) * tensor.nbytes // size)

    def _spare_like(self, inbox: Tensor) -> Tensor:
        """Return the spare tensor of the collecting thread, large enough for this inbox."""
        spare = self._spare.get(inbox.dtype)
        if spare is None or spare.numel() < inbox.numel():
            spare = self._spare[inbox.dtype] = torch.empty_like(inbox)
        return spare[: inbox.numel()]

    def _make_part(self, round: Round) -> _Part:
        own = round.neighbours(self.rank)
        group = self._group_in(round)
        reduces = len(group) >= _SMALLEST_REDUCED and group in self._groups
        # Receive from the next rank first, and on around the circle: then not all wait for the
        # same few senders at a time while the links of the others idle.
        order = np.argsort((own.receives.workers - self.rank) % self.size)
        weights = own.receives.weights[order]
        return _Part(
            self_weight=own.self_weight,
            senders=own.receives.workers[order].tolist(),
            shares=(weights / np.cumsum(weights)).tolist(),
            receivers=own.sends.workers.tolist(),
            reduced_with=group if reduces else (),
        )

    def _group_in(self, round: Round) -> tuple[int, ...]:
        """Return the ranks that this one averages with; none where the round has no groups."""
        group = round.group_of(self.rank)
        return () if group is None else tuple(group.tolist())

    def _open_group(self, members: tuple[int, ...], purpose: str) -> ProcessGroup:
        try:
            # A backend by itself has the methods that we call.
            group = cast(ProcessGroup, self._connect(members, purpose))
        except RuntimeError as error:
            others = self._others_in(members)
            raise self._bulletin.failure("connections", others, error) from error
        self._opened.append(group)
        return group

    def _connect(self, members: tuple[int, ...], purpose: str) -> object:
        if self._on_cpu:
            name = hashlib.blake2b(f"{purpose} {members}".encode(), digest_size=8).hexdigest()
            store = PrefixStore(name, self._bulletin.store)
            rank, size = members.index(self.rank), len(members)
            return ProcessGroupGloo(store, rank, size, self._bulletin.timeout)
        return dist.new_group(
            [dist.get_global_rank(self._base, member) for member in members],
            timeout=self._bulletin.timeout,
            backend=dist.get_backend(self._base),
            use_local_synchronization=True,
        )


def _messages(part: _Part, waits: Iterable[Callable[[], object]]) -> Exchange:
    return Exchange(part.self_weight, includes_self=False, waits=waits)


def _p2p(operation: Callable[..., Any], tensor: Tensor, peer: int, group: ProcessGroup) -> Any:
    return dist.P2POp(operation, tensor, group=group, group_peer=peer)
