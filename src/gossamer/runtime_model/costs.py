"""What a round or an all-reduce costs on given links.

Every message loads its sender's port, its receiver's, and where it leaves a node the links of both
nodes. Messages of a round travel together, so a message takes as long as the busiest link on its
way needs for all that it carries; a worker's part lasts as long as the longest of its messages.
"""

# W: workers, M: nodes, K: buckets, E: messages

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from gossamer.errors import UserError
from gossamer.runtime_model import profile as profiles
from gossamer.runtime_model.model import Exchange, Meet
from gossamer.topology import Round
from gossamer.topology.round import FloatArray, IntArray


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a cluster; each carries its rate in both directions at once."""

    node_of: IntArray
    """Node of each worker, [W]."""

    port_bits_s: FloatArray
    """Rate of each worker's own link, [W]."""

    uplink_bits_s: FloatArray
    """Rate of the link that the workers of a node share, [M]."""

    inside_latency_s: float = 0.0
    between_latency_s: float = 0.0
    reduce_efficiency: float = 1.0
    fan_in_efficiency: float = 1.0

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return len(self.node_of)

    @classmethod
    def of(cls, network: profiles.Network, num_workers: int) -> Links:
        """Return the links of a profile's network at some scale; the last node may not be full."""
        if num_workers < 1:
            raise UserError(f"a cluster has at least one worker, got {num_workers}; give 1 or more")
        node_of = np.arange(num_workers) // network.workers_per_node
        # A worker that has a node for itself has the node's link, and no other.
        port = network.between if network.workers_per_node == 1 else network.inside
        return cls(
            node_of=node_of,
            port_bits_s=np.full(num_workers, port.bits_s),
            uplink_bits_s=np.full(int(node_of[-1]) + 1, network.between.bits_s),
            inside_latency_s=network.inside.latency_s,
            between_latency_s=network.between.latency_s,
            reduce_efficiency=network.reduce_efficiency,
            fan_in_efficiency=network.fan_in_efficiency,
        )


def alone(times: FloatArray) -> FloatArray:
    """Meet nobody."""
    return times


def everyone(times: FloatArray) -> FloatArray:
    """Meet all workers."""
    return np.broadcast_to(times.max(axis=1, keepdims=True), times.shape)


def nothing(num_workers: int, num_buckets: int) -> Exchange:
    """Return the exchange of an iteration without communication."""
    return Exchange(alone, np.zeros((num_workers, num_buckets)))


def mix(links: Links, round: Round, bucket_bytes: Sequence[int]) -> Exchange:
    """Return the exchange of a round, as gossip runs it.

    Groups of three or more all-reduce, in a ring; everything else is messages, which a worker
    receives one after the other. It meets those it sends to as well: a message moves when both
    ends are there, and its sends must be taken before it goes on.
    """
    groups = round.groups()
    if groups is not None and round.degree > 1:
        return Exchange(_within(groups), _reduce_cost(links, groups, bucket_bytes))
    matrix = round.matrix().tocoo()
    receivers, senders = (index.astype(np.int64) for index in matrix.coords)
    between = receivers != senders
    senders, receivers = senders[between], receivers[between]
    per_bit_W = _busiest(links, senders, receivers, np.ones(len(senders)))
    per_bit_W = np.where(round.in_degrees > 1, per_bit_W / links.fan_in_efficiency, per_bit_W)
    latency_W = _sum_by(receivers, _latency(links, senders, receivers), links.num_workers)
    meet = _within(groups) if groups is not None else _with_neighbours(round)
    return Exchange(meet, _affine(latency_W, per_bit_W, bucket_bytes))


def ring_all_reduce(links: Links, bucket_bytes: Sequence[int]) -> Exchange:
    """Return an all-reduce of everyone in one ring: each link carries 2(n − 1)/n of the bytes."""
    groups = (np.arange(links.num_workers),)
    return Exchange(everyone, _reduce_cost(links, groups, bucket_bytes))


def hierarchical_all_reduce(links: Links, bucket_bytes: Sequence[int]) -> Exchange:
    """Return an all-reduce in three stages, as large clusters run it.

    Reduce-scatter inside nodes, all-reduce of each worker's share between nodes, all-gather
    inside. The link between nodes carries 2(M − 1)/M of the bytes.
    """
    workers, nodes = np.arange(links.num_workers), links.node_of
    size, num_nodes = int(np.bincount(nodes).min()), int(nodes[-1]) + 1
    if size * num_nodes != links.num_workers:
        raise UserError(
            f"a hierarchical all-reduce needs full nodes, got {links.num_workers} workers on "
            f"{num_nodes} nodes; use a multiple of the workers per node"
        )
    inside = nodes * size + (workers + 1) % size
    across = (workers + size) % links.num_workers
    per_bit_W = np.zeros(links.num_workers)
    latency_s = 0.0
    if size > 1:
        share = np.full(links.num_workers, 2 * (size - 1) / size)
        per_bit_W += _busiest(links, workers, inside, share)
        latency_s += 2 * (size - 1) * links.inside_latency_s
    if num_nodes > 1:
        share = np.full(links.num_workers, 2 * (num_nodes - 1) / num_nodes / size)
        per_bit_W += _busiest(links, workers, across, share)
        latency_s += 2 * (num_nodes - 1) * links.between_latency_s
    per_bit_W = np.full(links.num_workers, per_bit_W.max() / links.reduce_efficiency)
    return Exchange(
        everyone, _affine(np.full(links.num_workers, latency_s), per_bit_W, bucket_bytes)
    )


def _reduce_cost(
    links: Links, groups: Sequence[IntArray], bucket_bytes: Sequence[int]
) -> FloatArray:
    """Return what ring all-reduces cost that run in all groups at once, in the order of ranks."""
    successor = np.arange(links.num_workers)
    sizes = np.ones(links.num_workers)
    for members in groups:
        successor[members] = np.roll(members, -1)
        sizes[members] = len(members)
    senders = np.flatnonzero(sizes > 1)
    receivers = successor[senders]
    share = 2 * (sizes - 1) / sizes
    per_bit_W = _busiest(links, senders, receivers, share[senders]) / links.reduce_efficiency
    latency_W = np.zeros(links.num_workers)
    latency_W[senders] = _latency(links, senders, receivers)
    # Each of the 2(g − 1) turns of a ring waits for its slowest hop.
    for members in groups:
        per_bit_W[members] = per_bit_W[members].max()
        latency_W[members] = 2 * (len(members) - 1) * latency_W[members].max()
    return _affine(latency_W, per_bit_W, bucket_bytes)


def _affine(latency_W: FloatArray, per_bit_W: FloatArray, num_bytes: Sequence[int]) -> FloatArray:
    return latency_W[:, None] + per_bit_W[:, None] * (8.0 * np.asarray(num_bytes))


def _busiest(links: Links, senders: IntArray, receivers: IntArray, share: FloatArray) -> FloatArray:
    """Return seconds per bit of a bucket for each worker's part; share: of the bucket, [E]."""
    w, m = links.num_workers, len(links.uplink_bits_s)
    sends = _sum_by(senders, share, w) / links.port_bits_s
    takes = _sum_by(receivers, share, w) / links.port_bits_s
    seconds_E = np.maximum(sends[senders], takes[receivers])
    source, target = links.node_of[senders], links.node_of[receivers]
    leaves = np.where(source != target, share, 0.0)
    out = _sum_by(source, leaves, m) / links.uplink_bits_s
    into = _sum_by(target, leaves, m) / links.uplink_bits_s
    uplink_E = np.where(source != target, np.maximum(out[source], into[target]), 0.0)
    seconds_E = np.maximum(seconds_E, uplink_E)
    longest = np.zeros(w)
    np.maximum.at(longest, senders, seconds_E)
    np.maximum.at(longest, receivers, seconds_E)
    return longest


def _sum_by(index: IntArray, values: FloatArray, size: int) -> FloatArray:
    return np.bincount(index, values, minlength=size).astype(np.float64)


def _latency(links: Links, senders: IntArray, receivers: IntArray) -> FloatArray:
    same = links.node_of[senders] == links.node_of[receivers]
    return np.where(same, links.inside_latency_s, links.between_latency_s)


def _within(groups: Sequence[IntArray]) -> Meet:
    order = np.concatenate(groups)
    starts = np.cumsum([0, *(len(members) for members in groups[:-1])])
    sizes = [len(members) for members in groups]
    back = np.argsort(order)

    def meet(times: FloatArray) -> FloatArray:
        latest = np.maximum.reduceat(times[:, order], starts, axis=1)
        return np.repeat(latest, sizes, axis=1)[:, back]

    return meet


def _with_neighbours(round: Round) -> Meet:
    matrix = round.matrix()
    support = (matrix + matrix.T).tocsr()
    support.setdiag(1.0)
    support = support.tocsr()
    support.sort_indices()
    others, starts = support.indices.astype(np.int64), support.indptr[:-1].astype(np.int64)

    def meet(times: FloatArray) -> FloatArray:
        return np.maximum.reduceat(times[:, others], starts, axis=1)

    return meet
