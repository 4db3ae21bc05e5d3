"""Moving buckets between processes: messages and all-reduces on a private process group.

The group is our own, made on the store of the one that is passed in, so what users send or reduce
on theirs can never meet our messages. Ranks here are ranks within that group.

Note [No deadlock]
A round is begun bucket by bucket, in one order on all ranks, and beginning never waits: it posts
every send of the bucket and its first receive. What waits is the collecting of further receives,
one after the other into one spare tensor; it runs on a thread of its own, in the same order. Each
message that anybody waits for has therefore been posted, or will be by a rank that need not wait
for anything of this round before it posts. All-reduces run on groups whose members all begin them
in the same order. Gloo delivers the messages of one pair and tag in the order in which they were
posted, so one step's message cannot be taken for another's.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, cast, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import PrefixStore

from gossamer.topology import Round

_SMALLEST_REDUCED = 3
"""Groups of two exchange one message each way: the same bytes as an all-reduce, in one trip."""


class ExchangeError(RuntimeError):
    """An exchange did not complete: a peer is late, gone, or out of step."""


@final
class Exchange:
    """One bucket's exchange in flight.

    Args:
        keep: weight that the worker keeps on its own parameters; the inbox gets the rest.
        waits: what has to be waited for, in this order.
    """

    def __init__(self, keep: float, waits: Iterable[Callable[[], object]]) -> None:
        self.keep = keep
        self._waits = deque(waits)

    def wait(self) -> None:
        """Return when the inbox holds the neighbours' mean and the source may change again."""
        while self._waits:  # each only once: Gloo would wait for a second message
            self._waits.popleft()()


@final
@dataclass(frozen=True, slots=True)
class _Plan:
    """One rank's part in a round."""

    keep: float
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
        process_group: gives rank, size and store; nothing is sent on it.
        device: where the tensors live. CPU tensors travel over Gloo, others over the group's
            own backend.
        timeout: how long any single wait may take.
        rounds: rounds whose groups get process groups of their own to all-reduce on, now. Others
            run as messages, except where all ranks form one group.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        device: torch.device,
        *,
        timeout: timedelta,
        rounds: Iterable[Round] = (),
    ) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self.bytes_sent = 0
        self.messages_sent = 0
        self._on_cpu = device.type == "cpu"
        self._timeout = timeout
        # - Process groups, opened now and in one order on all ranks, because opening waits
        self._base = process_group
        self._store = _private_store(process_group)
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._everyone = tuple(range(self.size))
        for members in (self._everyone, *(self._group_in(round) for round in rounds)):
            if len(members) >= _SMALLEST_REDUCED or members == self._everyone:
                self._open_group(members)
        # - What each round means for this rank
        self._plan = lru_cache(maxsize=256)(self._make_plan)
        # - Further receives on the CPU; see Note [No deadlock]
        self._collector = _Thread()
        self._spare: dict[torch.dtype, Tensor] = {}

    def begin(self, round: Round, source: Tensor, inbox: Tensor, tag: int) -> Exchange:
        """Start one bucket's part of a round; see Note [No deadlock].

        Args:
            round: who mixes with whom.
            source: what is sent; it must not change until the exchange has been waited for.
            inbox: receives the mean of the neighbours, weighted as in the round.
            tag: number of the bucket.
        """
        plan = self._plan(round)
        if not plan.reduced_with:
            begin = self._begin_over_gloo if self._on_cpu else self._begin_over_nccl
            return begin(plan, source, inbox, tag)
        # Scaling while copying leaves the mean where a sum would need another pass.
        torch.mul(source, 1.0 / len(plan.reduced_with), out=inbox)
        return Exchange(plan.keep, [self._begin_sum(plan.reduced_with, inbox, f"bucket {tag}")])

    def average_(self, tensor: Tensor) -> None:
        """Replace the tensor by its mean over all ranks."""
        self._begin_sum(self._everyone, tensor.mul_(1.0 / self.size), "an average")()

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace the tensor by rank 0's."""
        contiguous = tensor.detach().contiguous()
        work = self._groups[self._everyone].broadcast([contiguous])
        self._wait(work, "what rank 0 broadcasts")
        tensor.detach().copy_(contiguous)

    def close(self) -> None:
        """End the collecting thread; what is in flight has to be waited for before."""
        self._collector.end()

    def _begin_over_gloo(self, plan: _Plan, source: Tensor, inbox: Tensor, tag: int) -> Exchange:
        receives = [self._receive(inbox, sender, tag) for sender in plan.senders[:1]]
        sends = [self._send(source, receiver, tag) for receiver in plan.receivers]
        if len(plan.senders) < 2:
            return Exchange(plan.keep, [*receives, *sends])

        def collect() -> None:
            receives[0]()
            spare = self._spare_like(inbox)
            for sender, share in zip(plan.senders[1:], plan.shares[1:], strict=True):
                self._receive(spare, sender, tag)()
                inbox.lerp_(spare, share)

        return Exchange(plan.keep, [self._collector.submit(collect).result, *sends])

    def _begin_over_nccl(self, plan: _Plan, source: Tensor, inbox: Tensor, tag: int) -> Exchange:
        # One batch per bucket, as NCCL requires, so each message gets a tensor of its own; waiting
        # and mixing are ordered by the device's streams.
        inboxes = [inbox, *(torch.empty_like(inbox) for _ in plan.senders[1:])]
        group = self._groups[self._everyone]
        operations = [
            *(_p2p(dist.irecv, t, s, group) for t, s in zip(inboxes, plan.senders, strict=False)),
            *(_p2p(dist.isend, source, receiver, group) for receiver in plan.receivers),
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        self._count(len(plan.receivers), len(plan.receivers) * _num_bytes(source))

        def collect() -> None:
            for work in works:
                self._wait(work, f"bucket {tag}")
            for other, share in zip(inboxes[1:], plan.shares[1:], strict=True):
                inbox.lerp_(other, share)

        return Exchange(plan.keep, [collect])

    def _receive(self, target: Tensor, sender: int, tag: int) -> Callable[[], None]:
        work = self._groups[self._everyone].recv([target], sender, tag)
        return partial(self._wait, work, f"bucket {tag} from rank {sender}")

    def _send(self, source: Tensor, receiver: int, tag: int) -> Callable[[], None]:
        work = self._groups[self._everyone].send([source], receiver, tag)
        self._count(1, _num_bytes(source))
        return partial(self._wait, work, f"rank {receiver} to take bucket {tag}")

    def _begin_sum(self, members: tuple[int, ...], tensor: Tensor, what: str) -> Callable[[], None]:
        size = len(members)
        if size == 1:
            return lambda: None
        work = self._groups[members].allreduce([tensor])
        self._count(2 * (size - 1), 2 * (size - 1) * _num_bytes(tensor) // size)
        return partial(self._wait, work, f"{what} over ranks {members}")

    def _wait(self, work: Work, what: str) -> None:
        try:
            # On a device, waiting orders streams and must not block the host; there NCCL's own
            # watchdog keeps the time.
            work.wait(self._timeout) if self._on_cpu else work.wait()
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank} waited for {what}, at most {self._timeout}, and failed: {error}"
            ) from error

    def _count(self, messages: int, num_bytes: int) -> None:
        self.messages_sent += messages
        self.bytes_sent += num_bytes

    def _spare_like(self, inbox: Tensor) -> Tensor:
        """Return the spare tensor of the collecting thread, large enough for this inbox."""
        spare = self._spare.get(inbox.dtype)
        if spare is None or spare.numel() < inbox.numel():
            spare = self._spare[inbox.dtype] = torch.empty_like(inbox)
        return spare[: inbox.numel()]

    def _make_plan(self, round: Round) -> _Plan:
        part = round.neighbours(self.rank)
        group = self._group_in(round)
        reduces = len(group) >= _SMALLEST_REDUCED and group in self._groups
        return _Plan(
            keep=0.0 if reduces else part.self_weight,
            senders=part.receives.workers.tolist(),
            shares=(part.receives.weights / np.cumsum(part.receives.weights)).tolist(),
            receivers=part.sends.workers.tolist(),
            reduced_with=group if reduces else (),
        )

    def _group_in(self, round: Round) -> tuple[int, ...]:
        """Return the ranks that this one averages with; none where the round has no groups."""
        groups = round.groups() or ()
        return next((tuple(g.tolist()) for g in groups if self.rank in g), ())

    def _open_group(self, members: tuple[int, ...]) -> None:
        if members in self._groups:
            return
        if self._on_cpu:
            name = hashlib.blake2b(str(members).encode(), digest_size=8).hexdigest()
            store = PrefixStore(name, self._store)
            rank, size = members.index(self.rank), len(members)
            group = ProcessGroupGloo(store, rank, size, self._timeout)
        else:
            ranks = [dist.get_global_rank(self._base, member) for member in members]
            group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        # A backend by itself has the methods that we call.
        self._groups[members] = cast(ProcessGroup, group)


@final
class _Thread:
    """One thread that runs tasks in the order in which they are submitted.

    A daemon, unlike an executor's: a rank that fails must not wait for its receives to time out
    before it can exit.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="gossamer-collector", daemon=True).start()

    def submit(self, task: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future

    def end(self) -> None:
        self._tasks.put(None)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, future = item
            try:
                future.set_result(task())
            except BaseException as error:  # handed to whoever waits for the future
                future.set_exception(error)


def _private_store(process_group: ProcessGroup) -> PrefixStore:
    """Return a part of the group's store that no other transport uses.

    Opening a transport is a collective call, so its number among those that this rank has opened
    is the same on all ranks.
    """
    store = process_group.get_group_store()
    serial = store.add(f"gossamer/opened/{process_group.rank()}", 1)
    return PrefixStore(f"gossamer/{serial}", store)


def _p2p(operation: Callable[..., Any], tensor: Tensor, peer: int, group: ProcessGroup) -> Any:
    return dist.P2POp(operation, tensor, group=group, group_peer=peer)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
