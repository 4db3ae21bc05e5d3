"""What a round or an all-reduce costs on given links.

Every message loads its sender's port, its receiver's, and between nodes the links of both nodes.
Messages of a round are concurrent, so a message takes as long as the most loaded link on its path
needs for its total load. A worker's part of bucket k takes

    c_k = Σ λ_e + 8 · bytes_k · max_e max_ℓ (load_ℓ / rate_ℓ) / η

over its messages e and the links ℓ on their paths: latencies λ of the messages it receives, one
after the other; loads in copies of the bucket; η the efficiency of such exchanges on the links.
"""

# W: workers, M: nodes, K: buckets, E: messages

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from gossamer.errors import UserError
from gossamer.runtime_model import profile as profiles
from gossamer.runtime_model.model import ExchangeTime, Meet
from gossamer.topology import Round
from gossamer.topology.arrays import FloatArray, IntArray
from gossamer.topology.cost import ring_copies, ring_messages


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a cluster; each carries its rate in both directions at once."""

    node_of: IntArray
    """Node of each worker, [W]."""

    port_bits_s: FloatArray
    """Rate of each worker's own link, [W]."""

    uplink_bits_s: FloatArray
    """Rate of the link between nodes that the workers of a node share, [M]."""

    inside_latency_s: float = 0.0
    between_latency_s: float = 0.0
    hierarchical: bool = False
    """Whether all-reduces are hierarchical (NCCL), instead of one ring (Gloo)."""

    reduce_efficiency: float = 1.0
    pair_efficiency: float = 1.0
    fan_in_efficiency: float = 1.0

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return len(self.node_of)

    @classmethod
    def of(cls, network: profiles.Network, num_workers: int) -> Links:
        """Return the links of a profile's network at some scale; the last node may not be full."""
        if num_workers < 1:
            raise UserError(
                f"a cluster needs at least one worker, got {num_workers}; use 1 or more"
            )
        node_of = np.arange(num_workers) // network.workers_per_node
        between = network.between
        if between is None and node_of[-1] > 0:
            raise UserError(
                f"{num_workers} workers in nodes of {network.workers_per_node} need the link "
                "between nodes, got a profile that was taken on one node; measure on two, or give "
                "the link, as gossamer plan --link 25gbit"
            )
        between = between or network.inside  # one node, which does not use it
        # A worker that is alone on its node has only the node's link.
        port = between if network.workers_per_node == 1 else network.inside
        return cls(
            node_of=node_of,
            port_bits_s=np.full(num_workers, port.bits_s),
            uplink_bits_s=np.full(int(node_of[-1]) + 1, between.bits_s),
            inside_latency_s=network.inside.latency_s,
            between_latency_s=between.latency_s,
            hierarchical=network.all_reduce == "hierarchical",
            reduce_efficiency=network.reduce_efficiency,
            pair_efficiency=network.pair_efficiency,
            fan_in_efficiency=network.fan_in_efficiency,
        )


def unsynchronized(times: FloatArray) -> FloatArray:
    """Wait for no other worker."""
    return times


def everyone(times: FloatArray) -> FloatArray:
    """Wait for all workers, as a global collective does."""
    return np.broadcast_to(times.max(axis=1, keepdims=True), times.shape)


def nothing(num_workers: int, num_buckets: int) -> ExchangeTime:
    """Return the exchange of an iteration without communication."""
    return ExchangeTime(unsynchronized, np.zeros((num_workers, num_buckets)))


def mix(
    links: Links,
    round: Round,
    bucket_bytes: Sequence[int],
    message_bytes: Sequence[float] | None = None,
) -> ExchangeTime:
    """Return the exchange of a round, as gossip runs it.

    Outside of all-reduces a worker receives its messages one after the other. It also waits for the
    workers it sends to: a transfer starts when both ends have posted it, and its sends must
    complete before the worker continues.

    Args:
        links: of the cluster.
        round: who mixes with whom.
        bucket_bytes: of each bucket.
        message_bytes: of the message of each bucket, where it is not the bucket itself.
    """
    groups = round.groups()
    cost_WK = _reduce_cost(links, round.reduced_groups(), bucket_bytes)
    receivers, senders = round.messages()
    per_bit_W = _busiest(links, senders, receivers, np.ones(len(senders)))
    per_bit_W /= np.where(round.in_degrees > 1, links.fan_in_efficiency, links.pair_efficiency)
    latency_W = _sum_by(receivers, _latency(links, senders, receivers), links.num_workers)
    meet = _within(groups) if groups is not None else _with_neighbours(round)
    return ExchangeTime(
        meet, cost_WK + _affine(latency_W, per_bit_W, message_bytes or bucket_bytes)
    )


def all_reduce(links: Links, bucket_bytes: Sequence[int]) -> ExchangeTime:
    """Return an all-reduce over all workers."""
    groups = (np.arange(links.num_workers),)
    return ExchangeTime(everyone, _reduce_cost(links, groups, bucket_bytes))


def all_gather_s(links: Links, row_bytes: int) -> float:
    """Return the time of an all-gather of one row per worker, as gossip runs it.

    At distance 1, 2, 4, … a worker forwards all rows that it has: ⌈log2 W⌉ messages, W − 1 rows.
    """
    others = links.num_workers - 1
    if others == 0:
        return 0.0
    crossing = np.bincount(links.node_of)[links.node_of]
    bits_s = min(links.port_bits_s.min(), (links.uplink_bits_s[links.node_of] / crossing).min())
    latency_s = max(links.inside_latency_s, links.between_latency_s)
    return others.bit_length() * latency_s + 8 * others * row_bytes / float(bits_s)


def _reduce_cost(
    links: Links, groups: Sequence[IntArray], bucket_bytes: Sequence[int]
) -> FloatArray:
    """Return the cost of concurrent all-reduces, one in each group.

    One ring, in the order of ranks: each hop carries 2(g − 1)/g of the bytes, in 2(g − 1) messages.
    Hierarchical: reduce-scatter inside nodes, a ring across nodes for each worker's shard,
    all-gather inside; a node's link carries 2(M − 1)/M of the bytes. Groups with unequal numbers of
    members on their nodes use one ring.
    """
    per_bit_W, latency_W = np.zeros(links.num_workers), np.zeros(links.num_workers)
    for rings, share_of_bytes in _stages(links, groups):
        one_bit_W, one_turn_W = _ring_cost(links, rings, share_of_bytes)
        per_bit_W += one_bit_W
        latency_W += one_turn_W
    for members in groups:
        per_bit_W[members] = per_bit_W[members].max() / links.reduce_efficiency
        latency_W[members] = latency_W[members].max()
    return _affine(latency_W, per_bit_W, bucket_bytes)


def _stages(links: Links, groups: Sequence[IntArray]) -> list[tuple[list[IntArray], list[float]]]:
    """Return the rings of each stage, and the fraction of the bytes that each ring reduces."""
    inside: list[IntArray] = []
    across: list[IntArray] = []
    shares: list[float] = []
    for members in groups:
        nodes, counts = np.unique(links.node_of[members], return_counts=True)
        staged = links.hierarchical and len(nodes) > 1 and counts.min() == counts.max() > 1
        if staged:
            by_node = members[np.argsort(links.node_of[members], kind="stable")]
            table = by_node.reshape(len(nodes), -1)
            inside += list(table)
            across += list(table.T)
            shares += [1 / table.shape[1]] * table.shape[1]
        else:
            across.append(members)
            shares.append(1.0)
    return [(inside, [1.0] * len(inside)), (across, shares)]


def _ring_cost(
    links: Links, rings: Sequence[IntArray], shares: Sequence[float]
) -> tuple[FloatArray, FloatArray]:
    """Return seconds per bit and latency of each worker in concurrent ring all-reduces."""
    successor = np.arange(links.num_workers)
    copies, turns = np.zeros(links.num_workers), np.zeros(links.num_workers)
    for members, share in zip(rings, shares, strict=True):
        successor[members] = np.roll(members, -1)
        copies[members] = share * ring_copies(len(members))
        turns[members] = ring_messages(len(members))
    senders = np.flatnonzero(turns)
    receivers = successor[senders]
    per_bit_W = _busiest(links, senders, receivers, copies[senders])
    latency_W = np.zeros(links.num_workers)
    latency_W[senders] = turns[senders] * _latency(links, senders, receivers)
    return per_bit_W, latency_W


def _affine(latency_W: FloatArray, per_bit_W: FloatArray, num_bytes: Sequence[float]) -> FloatArray:
    return latency_W[:, None] + per_bit_W[:, None] * (8.0 * np.asarray(num_bytes))


def _busiest(links: Links, senders: IntArray, receivers: IntArray, share: FloatArray) -> FloatArray:
    """Return seconds per bit of a bucket for each worker; share: of a bucket, per message, [E]."""
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
    support.sort_indices()
    others, starts = support.indices.astype(np.int64), support.indptr[:-1].astype(np.int64)

    def meet(times: FloatArray) -> FloatArray:
        return np.maximum.reduceat(times[:, others], starts, axis=1)

    return meet
