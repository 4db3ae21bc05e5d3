"""Sending buckets between processes: the messages and all-reduces of a round.

Note [No deadlock]
A round is started bucket by bucket, in the same order on all ranks, and starting never blocks: it
posts every send of the bucket and its first receive. A thread of its own collects further messages,
which blocks: one after the other into one spare tensor, in the same order of buckets. So each
message that a rank waits for has been posted, or will be by a rank that waits for nothing of this
round before it posts. If neighbours are not connected yet, the collecting thread connects them, in
an order that all ranks share, before it posts and collects. That thread also encodes and posts
coded messages, all of a round before it collects the first. All members of a group start its all-
reduces in the same order.

An exchange ends only when its sends have been received, and a rank starts the next round after
that; Gloo delivers the messages of one pair and tag in the order in which they were posted. So a
message of one step cannot be mistaken for that of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gossamer.gossip.collector import Collector
from gossamer.gossip.connections import Connections
from gossamer.gossip.exchange import Exchange, InFlight
from gossamer.gossip.parcel import CodedExchange, Parcel
from gossamer.gossip.telemetry import Telemetry
from gossamer.topology import Round

_Posted: TypeAlias = tuple[list[Callable[[], None]], list[Callable[[], None]]]
"""Functions that wait for the first receive, if there is one, and for each send."""


@final
@dataclass(frozen=True, slots=True)
class _Role:
    """One rank's part in a round."""

    self_weight: float
    senders: list[int]
    weights: list[float]
    """The weight of each sender."""

    receivers: list[int]
    lanes: frozenset[tuple[int, int]]
    """Sender and receiver of each connection that its messages need."""

    reduced_with: tuple[int, ...]
    """The ranks to average with by an all-reduce; empty if the round runs as messages."""

    in_group: bool
    """Whether this rank is in a group that averages exactly, by an all-reduce or by messages. If
    one member is left out, none of them mixes."""


@final
class Transport:
    """Exchanges tensors with neighbours on behalf of one rank.

    Args:
        connections: the connections to neighbours.
        telemetry: counts messages and bytes.
        rounds: rounds whose ranks are connected now: groups of three or more by a process group
            for their all-reduce, others by lanes. Ranks of other rounds are connected when they
            start one, and exchange messages, unless all ranks form one group.
    """

    def __init__(
        self, connections: Connections, telemetry: Telemetry, *, rounds: Iterable[Round] = ()
    ) -> None:
        self.rank, self.size = connections.rank, connections.size
        self._connections = connections
        self._telemetry = telemetry
        # - Connections. Opening blocks until the peers open the same one: in another order than
        #   theirs it would deadlock.
        self._everyone = connections.everyone
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        # Not a bound method: that would be a reference cycle, which keeps connections open until a
        # garbage collection, and that is rare in a process that trains.
        make_role = partial(_make_role, self.rank, self.size, self._groups, connections.on_cpu)
        self._role_in = lru_cache(maxsize=256)(make_role)
        rounds = [*rounds]
        with connections.detector.blocked():
            for members in (self._everyone, *(_reduced_with(self.rank, round) for round in rounds)):
                if members and members not in self._groups:
                    self._groups[members] = connections.open(members, "rounds")
            for round in rounds:  # after all groups: a role depends on which of them are open
                connections.open_lanes(self._role_in(round).lanes)
        # - The collecting thread, and its spare tensors by dtype; see Note [No deadlock]
        self._collector = Collector()
        self._spare: dict[torch.dtype, Tensor] = {}

    def begin(self, round: Round, source: Tensor, inbox: Tensor, tag: int) -> Exchange:
        """Start the exchange of one bucket; does not block, see Note [No deadlock].

        Args:
            round: who mixes with whom.
            source: the tensor to send; it must not change until the exchange is complete.
            inbox: receives the mean of the neighbours, weighted as in the round.
            tag: index of the bucket.
        """
        role = self._role_in(round)
        exchange = Exchange(
            role.self_weight, inbox, all_or_none=role.in_group, keeps_rest=round.keeps_consensus
        )
        if not role.reduced_with:
            # Counted here, not where messages are posted: that may be on the collecting thread, and
            # `+=` from two threads can lose counts.
            self._telemetry.count(len(role.receivers), len(role.receivers) * source.nbytes)
            begin = self._begin_over_gloo if self._connections.on_cpu else self._begin_over_nccl
            return exchange.after(begin(role, source, inbox, tag, exchange))
        # Dividing while copying saves a pass over the sum. By the size, not times its rounded
        # inverse: that error has one sign, and parameters would drift by it at every step.
        torch.div(source, len(role.reduced_with), out=inbox)
        group = self._groups[role.reduced_with]
        what = f"the average of bucket {tag}"
        self._telemetry.count_all_reduce(len(role.reduced_with), inbox.nbytes)
        wait = self._connections.begin_sum(group, role.reduced_with, inbox, what)
        return exchange.after([wait, partial(exchange.take_sum, role.reduced_with)])

    def begin_coded(
        self, round: Round, parcels: Sequence[tuple[int, Parcel]], *, marks: bool
    ) -> list[CodedExchange]:
        """Start the coded exchanges of some buckets; does not block, see Note [No deadlock].

        The collecting thread encodes and posts all of them before it waits for any.

        Args:
            round: who mixes with whom.
            parcels: tag and memory of each bucket, which must not change until the exchange is
                complete.
            marks: whether this rank is left out, and sends marks.
        """
        role = self._role_in(round)
        begun = [
            CodedExchange(
                parcel,
                role.self_weight,
                role.receivers,
                keeps_rest=round.keeps_consensus,
                marks=marks,
            )
            for _, parcel in parcels
        ]
        num_bytes = sum(parcel.incoming.nbytes for _, parcel in parcels)
        num_receivers = len(role.receivers)
        self._telemetry.count(num_receivers * len(parcels), num_receivers * num_bytes)
        tagged = [(tag, exchange) for (tag, _), exchange in zip(parcels, begun, strict=True)]
        if not self._connections.on_cpu:
            for tag, exchange in tagged:
                source, inbox = exchange.fill(), exchange.parcel.incoming
                exchange.after(self._begin_over_nccl(role, source, inbox, tag, exchange))
            return begun
        # All posts are queued before the first collect, so that later buckets are in flight while
        # earlier ones are decoded.
        posted = [
            self._collector.submit(partial(self._fill_and_post, role, tag, exchange))
            for tag, exchange in tagged
        ]
        for (tag, exchange), posts in zip(tagged, posted, strict=True):
            # Defaults bind the loop's variables, which change before the thread runs.
            def collect(
                tag: int = tag,
                exchange: CodedExchange = exchange,
                posts: Future[_Posted] = posts,
            ) -> None:
                first, sends = posts.result()
                self._collect(role, exchange.parcel.incoming, tag, first, exchange)
                for wait in sends:
                    wait()

            exchange.after([self._collector.submit(collect).result])
        return begun

    def _fill_and_post(self, role: _Role, tag: int, exchange: CodedExchange) -> _Posted:
        self._connections.open_lanes(role.lanes)
        return self._post(role, exchange.fill(), exchange.parcel.incoming, tag)

    def wait_for(self, exchange: InFlight) -> None:
        """Block until the exchange is complete: its inbox is filled, its source may change."""
        with self._connections.detector.blocked():
            exchange.wait()

    def close(self) -> None:
        """End the collecting thread and release connections; nothing may be in flight."""
        self._collector.end()
        self._role_in.cache_clear()
        self._spare.clear()
        self._groups.clear()

    def wait_idle(self, seconds: float) -> bool:
        """Wait until the collecting thread is idle; return whether it is before the timeout."""
        return self._collector.wait_idle(seconds)

    def _begin_over_gloo(
        self, role: _Role, source: Tensor, inbox: Tensor, tag: int, exchange: Exchange
    ) -> list[Callable[[], object]]:
        if not self._connections.are_open(role.lanes):
            # On the collecting thread, because opening blocks until the peer opens the lane, too.
            def connect_and_exchange() -> None:
                self._connections.open_lanes(role.lanes)
                first, sends = self._post(role, source, inbox, tag)
                self._collect(role, inbox, tag, first, exchange)
                for wait in sends:
                    wait()

            return [self._collector.submit(connect_and_exchange).result]
        first, sends = self._post(role, source, inbox, tag)
        collect = partial(self._collect, role, inbox, tag, first, exchange)
        if len(role.senders) < 2:  # the only receive is posted: nothing is left for the thread
            return [collect, *sends]
        return [self._collector.submit(collect).result, *sends]

    def _post(self, role: _Role, source: Tensor, inbox: Tensor, tag: int) -> _Posted:
        """Post the first receive, and all sends; return the functions that wait for them."""
        first = [self._receive(inbox, sender, tag) for sender in role.senders[:1]]
        return first, [self._send(source, receiver, tag) for receiver in role.receivers]

    def _collect(
        self,
        role: _Role,
        inbox: Tensor,
        tag: int,
        first: list[Callable[[], None]],
        exchange: InFlight,
    ) -> None:
        """Wait for the first receive, then receive and mix the others one after the other."""
        for wait in first:
            wait()
            exchange.take(inbox, role.senders[0], role.weights[0])
        for sender, weight in zip(role.senders[1:], role.weights[1:], strict=True):
            # One spare tensor for all: a receive must be mixed before the next is posted, or that
            # would overwrite it.
            spare = self._spare_like(inbox)
            self._receive(spare, sender, tag)()
            exchange.take(spare, sender, weight)
        exchange.complete()

    def _begin_over_nccl(
        self, role: _Role, source: Tensor, inbox: Tensor, tag: int, exchange: InFlight
    ) -> list[Callable[[], object]]:
        # NCCL needs sends and receives in one batch, or a send could block the receive that its
        # peer waits for. So each message has a tensor of its own, and a round of degree k holds k
        # copies. Waiting and mixing are ordered by the device's streams.
        inboxes = [inbox, *(torch.empty_like(inbox) for _ in role.senders[1:])]
        group = self._groups[self._everyone]
        operations = [
            *(_p2p(dist.irecv, t, s, group) for t, s in zip(inboxes, role.senders, strict=False)),
            *(_p2p(dist.isend, source, receiver, group) for receiver in role.receivers),
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def collect() -> None:
            for work in works:
                self._connections.wait(work, f"bucket {tag}", tuple(role.senders))
            for arrived in zip(inboxes, role.senders, role.weights, strict=False):
                exchange.take(*arrived)
            exchange.complete()

        return [collect]

    def _receive(self, target: Tensor, sender: int, tag: int) -> Callable[[], None]:
        lane = self._connections.lane(sender, self.rank)
        what = f"bucket {tag} from rank {sender}"
        return self._connections.begin(lambda: lane.recv([target], 0, tag), what, (sender,))

    def _send(self, source: Tensor, receiver: int, tag: int) -> Callable[[], None]:
        lane = self._connections.lane(self.rank, receiver)
        what = f"rank {receiver} to take bucket {tag}"
        return self._connections.begin(lambda: lane.send([source], 1, tag), what, (receiver,))

    def _spare_like(self, inbox: Tensor) -> Tensor:
        """Return the collecting thread's spare tensor of this inbox's size."""
        spare = self._spare.get(inbox.dtype)
        if spare is None or spare.numel() < inbox.numel():
            spare = self._spare[inbox.dtype] = torch.empty_like(inbox)
        return spare[: inbox.numel()]


def _make_role(
    rank: int, size: int, groups: Mapping[tuple[int, ...], ProcessGroup], on_cpu: bool, round: Round
) -> _Role:
    own = round.neighbours(rank)
    reduced_with = _reduced_with(rank, round)
    # Receive from the next higher rank first, then around the circle. In the order of ranks,
    # all neighbours of rank 0 would wait for it at once, and the links of others would idle.
    order = np.argsort((own.receives.workers - rank) % size)
    reduces = reduced_with in groups
    senders, receivers = own.receives.workers[order].tolist(), own.sends.workers.tolist()
    lanes = [*((s, rank) for s in senders), *((rank, r) for r in receivers)]
    return _Role(
        self_weight=own.self_weight,
        senders=senders,
        weights=own.receives.weights[order].tolist(),
        receivers=receivers,
        lanes=frozenset(() if reduces or not on_cpu else lanes),
        reduced_with=reduced_with if reduces else (),
        in_group=bool(reduced_with),
    )


def _reduced_with(rank: int, round: Round) -> tuple[int, ...]:
    """Return the group of three or more that this rank averages exactly in; empty for none."""
    group = round.group_of(rank) if round.reduces[rank] else None
    return () if group is None else tuple(group.tolist())


def _p2p(operation: Callable[..., Any], tensor: Tensor, peer: int, group: ProcessGroup) -> Any:
    return dist.P2POp(operation, tensor, group=group, group_peer=peer)
