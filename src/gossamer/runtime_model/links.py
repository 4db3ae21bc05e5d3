"""Measure the links between ranks, in the patterns in which training uses them.

All calls are collective. Pairs are measured one at a time, in both directions at once, which is how
gossip exchanges; then all workers of a node with those of the next, which share its link; then the
efficiency of links under full load: in pairs, in an all-reduce, and in a ring in which each rank
receives from two. Repeats of pairs and patterns are interleaved, and the median is taken, so that a
burst of other load does not fall on a single one of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gossamer.runtime_model import costs
from gossamer.runtime_model.model import ExchangeTime
from gossamer.runtime_model.profile import Link, Network, Pair
from gossamer.topology import one_peer_ring, ring

_PROBE_BYTES = 1 << 18
_MOST_BYTES = 1 << 25
_WINDOW_S = 0.25
"""How long one transfer should take: long enough to amortize a burst."""

_PINGS = 8
_REPEATS = 3
_PATTERN_REPEATS = 5
"""More repeats: a link's rate is also a median over pairs, and there is one of each pattern."""

_MOST_PAIRS = 12


def measure_network(
    process_group: ProcessGroup, workers_per_node: int, device: torch.device
) -> tuple[Network, list[Pair]]:
    """Measure all links; a collective call of two or more ranks.

    Args:
        process_group: the ranks.
        workers_per_node: consecutive ranks that share a node.
        device: where training's tensors live.
    """
    probe = _Probe(process_group, device)
    pairs = probe.pairs(_choose_pairs(probe.size, workers_per_node))
    inside = [p.link for p in pairs if _same_node(p, workers_per_node)]
    between = [p.link for p in pairs if not _same_node(p, workers_per_node)]
    apart = _median(between) if between else None
    if apart is not None and workers_per_node > 1:
        shared_bits_s = probe.node_rate(workers_per_node, apart)
        apart = Link(bits_s=shared_bits_s, latency_s=apart.latency_s)
    network = Network(
        workers_per_node=workers_per_node,
        inside=_median(inside or between),
        between=apart,
        all_reduce="hierarchical" if dist.get_backend(process_group) == "nccl" else "ring",
    )
    efficiencies = probe.efficiencies(costs.Links.of(network, probe.size))
    return Network.model_validate({**network.model_dump(), **efficiencies}), pairs


class _Probe:
    """Timed transfers on one process group."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        # Touched once: page faults on first use would count as transfer time.
        self._memory = [torch.ones(_MOST_BYTES // 4, device=device) for _ in range(3)]
        self.rank, self.size = group.rank(), group.size()

    def pairs(self, chosen: list[tuple[int, int]]) -> list[Pair]:
        """Measure the link of each pair while all other ranks wait; every rank gets the result."""
        latencies = [self._of_pair(ranks, self._latency_s) for ranks in chosen]
        sizes = [int(self._of_pair(ranks, self._size_for)) for ranks in chosen]
        took = [
            [
                self._of_pair(ranks, partial(self._exchange_s, num_bytes=num_bytes))
                for ranks, num_bytes in zip(chosen, sizes, strict=True)
            ]
            for _ in range(_REPEATS)
        ]
        return [
            Pair(
                ranks=ranks,
                link=Link(
                    bits_s=8 * num_bytes / max(statistics.median(seconds) - latency_s, 1e-9),
                    latency_s=latency_s,
                ),
            )
            for ranks, latency_s, num_bytes, *seconds in zip(
                chosen, latencies, sizes, *took, strict=True
            )
        ]

    def node_rate(self, workers_per_node: int, link: Link) -> float:
        """Return the rate at which all workers of a node exchange with the next one."""
        num_bytes = _bytes_for(link.bits_s / workers_per_node)
        partner = self.rank + workers_per_node * (1 if self.rank < workers_per_node else -1)

        def act() -> None:
            if self.rank < 2 * workers_per_node:
                self._exchange(partner, num_bytes)

        seconds = statistics.median(self._slowest_s(act) for _ in range(_REPEATS))
        return 8 * num_bytes * workers_per_node / max(seconds - link.latency_s, 1e-9)

    def efficiencies(self, links: costs.Links) -> dict[str, float]:
        """Return the efficiency of pairs, an all-reduce and a ring, relative to unloaded links."""
        patterns = [
            _pattern("reduce_efficiency", partial(costs.all_reduce, links), self._all_reduce)
        ]
        if self.size > 2:
            pairs = partial(costs.mix, links, one_peer_ring(self.size).round(0))
            both = partial(costs.mix, links, ring(self.size))
            patterns += [
                _pattern("pair_efficiency", pairs, self._exchange_in_pairs),
                _pattern("fan_in_efficiency", both, self._ring),
            ]
        took = [
            [self._slowest_s(pattern.act) for pattern in patterns] for _ in range(_PATTERN_REPEATS)
        ]
        return {
            pattern.field: float(
                np.clip(pattern.expected_s / statistics.median(seconds), 0.05, 2.0)
            )
            for pattern, *seconds in zip(patterns, *took, strict=True)
        }

    def _exchange(self, peer: int, num_bytes: int) -> None:
        # Post the receive before waiting: two ranks that both wait for a send first would deadlock.
        outgoing, incoming, _ = self._tensors(num_bytes)
        self._run([(dist.irecv, incoming, peer), (dist.isend, outgoing, peer)])

    def _exchange_in_pairs(self, num_bytes: int) -> None:
        """Exchange with the neighbour that the first round of a one-peer ring gives."""
        peer = self.rank ^ 1
        if peer < self.size:
            self._exchange(peer, num_bytes)

    def _ring(self, num_bytes: int) -> None:
        """Receive from both neighbours, one after the other, as gossip does."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        tensors = self._tensors(num_bytes)
        if self._device.type != "cpu":
            sends = [(dist.isend, tensors[0], peer) for peer in (after, before)]
            self._run([(dist.irecv, tensors[1], after), (dist.irecv, tensors[2], before), *sends])
            return
        group = self._group
        works = [group.recv([tensors[1]], after, 0)]
        works += [group.send([tensors[0]], peer, 0) for peer in (after, before)]
        works[0].wait()
        group.recv([tensors[2]], before, 0).wait()
        for work in works[1:]:
            work.wait()

    def _run(self, operations: list[tuple[Callable[..., object], Tensor, int]]) -> None:
        posted = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
            for operation, tensor, peer in operations
        ]
        for work in dist.batch_isend_irecv(posted):
            work.wait()

    def _all_reduce(self, num_bytes: int) -> None:
        dist.all_reduce(self._tensors(num_bytes)[0], group=self._group)

    def _tensors(self, num_bytes: int) -> list[Tensor]:
        return [memory[: num_bytes // 4] for memory in self._memory]

    def _of_pair(self, ranks: tuple[int, int], act: Callable[[int], float]) -> float:
        """Return on every rank what the first of two measures, while only those two transfer."""
        told = torch.zeros(1, dtype=torch.float64, device=self._device)
        if self.rank in ranks:
            first, second = ranks
            found = act(second if self.rank == first else first)
            told[0] = found if self.rank == first else 0.0
        dist.all_reduce(told, group=self._group)
        return told.item()

    def _latency_s(self, peer: int) -> float:
        return min(self._exchange_s(peer, 8) for _ in range(_PINGS))

    def _size_for(self, peer: int) -> float:
        """Return how many bytes take about as long as the window."""
        return _bytes_for(8 * _PROBE_BYTES / self._exchange_s(peer, _PROBE_BYTES))

    def _exchange_s(self, peer: int, num_bytes: int) -> float:
        return self._time(lambda: self._exchange(peer, num_bytes))

    def _slowest_s(self, act: Callable[[], None]) -> float:
        """Return the time of the slowest rank; a barrier comes first."""
        self._slowest(0.0)
        return self._slowest(self._time(act))

    def _time(self, act: Callable[[], None]) -> float:
        began = time.perf_counter()
        act()
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - began

    def _slowest(self, seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return float(value.item())


class _Pattern(NamedTuple):
    """A pattern in which all ranks use the links."""

    field: str
    """Of the profile's network."""

    expected_s: float
    act: Callable[[], None]


def _pattern(
    field: str, cost: Callable[[list[int]], ExchangeTime], act: Callable[[int], None]
) -> _Pattern:
    """Return a pattern with as many bytes as should take about the window."""

    def expected_s(num_bytes: int) -> float:
        return float(cost([num_bytes]).cost_WK.max())

    num_bytes = _bytes_for(8 * _PROBE_BYTES / expected_s(_PROBE_BYTES))
    return _Pattern(field, expected_s(num_bytes), partial(act, num_bytes))


def _bytes_for(bits_s: float) -> int:
    return int(np.clip(bits_s / 8 * _WINDOW_S, _PROBE_BYTES, _MOST_BYTES)) // 8 * 8


def _choose_pairs(size: int, workers_per_node: int) -> list[tuple[int, int]]:
    """Return pairs to measure: all of a few ranks; of many, neighbours inside and across nodes."""
    every = list(combinations(range(size), 2))
    if len(every) <= _MOST_PAIRS:
        return every
    near = [(rank, rank + 1) for rank in range(size - 1)]
    far = [(rank, rank + workers_per_node) for rank in range(size - workers_per_node)]
    chosen = list(dict.fromkeys([*near, *far]))
    step = -(-len(chosen) // _MOST_PAIRS)
    return chosen[::step]


def _same_node(pair: Pair, workers_per_node: int) -> bool:
    return pair.ranks[0] // workers_per_node == pair.ranks[1] // workers_per_node


def _median(links: list[Link]) -> Link:
    return Link(
        bits_s=statistics.median(link.bits_s for link in links),
        latency_s=statistics.median(link.latency_s for link in links),
    )
