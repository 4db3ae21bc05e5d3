"""Schedules: which round is used at which step.

A schedule is a number of workers, a period and a function from the step to a Round. Rounds are
built when asked for and the last few are kept, so that a schedule with a thousand rounds costs
nothing until it runs. Every worker builds the same schedule from the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import final

import numpy as np
from scipy.sparse import csr_array

from gossamer.errors import UserError
from gossamer.topology.base_graph import base_graph_rounds
from gossamer.topology.graphs import (
    check_power_of_two,
    check_workers,
    complete,
    lattice,
    powers_of_two_below,
)
from gossamer.topology.round import IntArray, Round
from gossamer.topology.weights import group_average, is_connected

_ROUNDS_KEPT = 64


@final
@dataclass(frozen=True, eq=False)
class Schedule:
    """The round of every step.

    Args:
        num_workers: how many workers take part in every round.
        period: the number of steps after which rounds repeat, or None where they never do.
        build: returns the round of a step in 0..period − 1 (of any step where period is None).
        name: what reports call it; ``parse`` sets it to a text that parses to the same schedule.
    """

    num_workers: int
    period: int | None
    build: Callable[[int], Round] = field(repr=False)
    name: str = "custom"

    def __post_init__(self) -> None:
        object.__setattr__(self, "build", lru_cache(_ROUNDS_KEPT)(self.build))

    def round(self, step: int) -> Round:
        """Return the round that step t (from 0) mixes with."""
        if step < 0:
            raise UserError(f"steps count from 0, got {step}")
        return self.build(step if self.period is None else step % self.period)


def static(round: Round) -> Schedule:
    """The same round at every step."""
    if not is_connected(round.matrix()):
        raise UserError(
            "a static schedule needs a connected graph, got one that leaves workers unreachable; "
            "add edges, or alternate several rounds with topology.cycle"
        )
    return cycle([round])


def cycle(rounds: Sequence[Round]) -> Schedule:
    """The given rounds, one after the other, again and again."""
    kept = tuple(rounds)
    sizes = sorted({r.num_workers for r in kept})
    if len(sizes) != 1:
        raise UserError(
            f"a cycle needs at least one round, all on the same number of workers, got {sizes}"
        )
    return Schedule(sizes[0], len(kept), kept.__getitem__)


def one_peer_ring(num_workers: int) -> Schedule:
    """Alternating pairs on a ring: (0,1)(2,3)…, then (1,2)(3,4)…; an odd ring rests one in turn."""
    check_workers(num_workers)

    def build(step: int) -> Round:
        # Pair number of each worker when pairing starts at worker `step`. On an odd ring the last
        # worker has no partner left; its pair has one member.
        return group_average((np.arange(num_workers) - step) % num_workers // 2)

    return Schedule(num_workers, 2 if num_workers % 2 == 0 else num_workers, build)


def one_peer_exponential(num_workers: int, pairs: bool = False) -> Schedule:
    """Step t: i receives from i + 2^t (mod n), or pairs at that distance; exact for n = 2^m.

    Args:
        num_workers: any number for the directed form, a power of two for pairs.
        pairs: exchange with one partner in place of sending to one and receiving from another.
            The same rounds as ``one_peer_hypercube``.
    """
    check_workers(num_workers)
    if pairs:
        return one_peer_hypercube(num_workers)
    distances = powers_of_two_below(max(2, num_workers))  # alone, a worker is its own peer
    workers = np.arange(num_workers)

    def build(step: int) -> Round:
        return _keep_and_take(workers + distances[step], share=0.5)

    return Schedule(num_workers, len(distances), build)


def one_peer_hypercube(num_workers: int) -> Schedule:
    """Step t: pairs that differ in bit t of their number; the exact average after log2 n steps."""
    check_power_of_two(num_workers, "one_peer_hypercube", "one_peer_exponential")
    num_bits = num_workers.bit_length() - 1

    def build(step: int) -> Round:
        return group_average(np.arange(num_workers) & ~(1 << step))

    return Schedule(num_workers, max(1, num_bits), build)


def random_matching(num_workers: int, seed: int = 0) -> Schedule:
    """A new random pairing at every step; with an odd number of workers one rests."""
    check_workers(num_workers)

    def build(step: int) -> Round:
        order = np.random.default_rng((seed, step)).permutation(num_workers)
        return group_average(order // 2)

    return Schedule(num_workers, None, build)


def aer(
    num_workers: int, workers_per_node: int = 1, node_of: Sequence[int] | None = None
) -> Schedule:
    """Alternating exponential ring: half of the node pairs average across, half inside nodes.

    Level r pairs the nodes that differ in bit r, and takes two steps: in the first the
    odd-numbered pairs average over both nodes while the nodes of even-numbered pairs average
    internally; in the second the roles swap. Exact after one period of 2·log2(nodes) steps.

    Args:
        num_workers: workers_per_node times a power of two.
        workers_per_node: how many consecutive workers share a node, as torchrun numbers ranks:
            worker i is on node i // workers_per_node.
        node_of: the node of each worker, where that rule does not describe the cluster.

    Reference: Wang et al., From promise to practice (https://arxiv.org/abs/2410.11998).
    """
    check_workers(num_workers)
    if node_of is None:
        nodes = np.arange(num_workers) // _positive(workers_per_node, "workers_per_node")
    else:
        nodes = np.asarray(node_of, dtype=np.int64)
    num_nodes = _check_nodes(num_workers, nodes)

    def build(step: int) -> Round:
        level, second = divmod(step, 2)
        bit = 1 << level
        first_of_pair = nodes & ~bit
        # Number the pairs 1, 2, … by their first node: squeeze the paired bit out of its number.
        number = (first_of_pair >> (level + 1) << level) + (first_of_pair & (bit - 1)) + 1
        across = number % 2 == 1 - second
        return group_average(np.where(across, first_of_pair, nodes))

    num_levels = num_nodes.bit_length() - 1
    if num_levels == 0:
        return static(complete(num_workers))
    return Schedule(num_workers, 2 * num_levels, build)


def base_graph(num_workers: int, k: int = 1) -> Schedule:
    """Base-(k+1) graph: the exact average in finite time on any number of workers, degree <= k.

    Reference: Takezawa et al., Beyond exponential graph (https://arxiv.org/abs/2305.11420).
    """
    check_workers(num_workers)
    return cycle(base_graph_rounds(num_workers, _positive(k, "k")))


def od_equidyn(num_workers: int, eta: float = 0.5, seed: int = 0) -> Schedule:
    """EquiTopo, directed: at every step i receives from i + u for one random distance u.

    W = (1 − η)I + ηA, where A keeps 1/n and takes (n − 1)/n from the peer at distance u, drawn
    from 1..n − 1. With η = 1/2 a step shrinks the expected squared error by (n − 1)/(2n), on any
    number of workers.

    Reference: Song et al., Communication-efficient topologies (https://arxiv.org/abs/2210.07881).
    """

    def peers(distance: int, rng: np.random.Generator) -> IntArray:
        return np.arange(num_workers) + distance

    return _equidyn(num_workers, eta, seed, peers)


def ou_equidyn(num_workers: int, eta: float = 0.5, seed: int = 0) -> Schedule:
    """EquiTopo, undirected: at every step pairs at one random distance u exchange.

    The weights of ``od_equidyn``. Pairs (i, i + u) are formed greedily from a random worker on;
    those left over rest.
    """

    def peers(distance: int, rng: np.random.Generator) -> IntArray:
        return _pair_at(num_workers, distance, start=int(rng.integers(num_workers)))

    return _equidyn(num_workers, eta, seed, peers)


def ada(num_workers: int, k0: int, gamma: float, steps_per_epoch: int, k_min: int = 2) -> Schedule:
    """A ring lattice that thins out: k(epoch) = max(k0 − int(γ·epoch), k_min).

    An odd k is floored to even; k >= n − 1 is the complete graph.

    Args:
        num_workers: any number.
        k0: neighbours in the first epoch.
        gamma: neighbours lost per epoch.
        steps_per_epoch: steps after which the epoch counts up.
        k_min: where thinning ends; 2 is the ring.

    Reference: Xie et al., Scaling up data parallelism (https://arxiv.org/abs/2509.12213).
    """
    check_workers(num_workers)
    _positive(steps_per_epoch, "steps_per_epoch")
    if k_min < 2 or k0 < k_min or gamma < 0:
        raise UserError(
            f"ada needs k0 >= k_min >= 2 and gamma >= 0, got k0={k0}, k_min={k_min}, gamma={gamma}"
        )

    @lru_cache(_ROUNDS_KEPT)
    def with_degree(k: int) -> Round:
        return complete(num_workers) if k >= num_workers - 1 else lattice(num_workers, k)

    def build(step: int) -> Round:
        k = max(k0 - int(gamma * (step // steps_per_epoch)), k_min)
        return with_degree(k - k % 2)

    return Schedule(num_workers, None, build)


def _equidyn(
    num_workers: int,
    eta: float,
    seed: int,
    peers: Callable[[int, np.random.Generator], IntArray],
) -> Schedule:
    check_workers(num_workers)
    if not 0 < eta <= 1:
        raise UserError(f"equidyn needs 0 < eta <= 1, got eta={eta}; the paper uses 0.5")
    share = eta * (num_workers - 1) / num_workers

    def build(step: int) -> Round:
        rng = np.random.default_rng((seed, step))
        distance = int(rng.integers(1, max(2, num_workers)))
        return _keep_and_take(peers(distance, rng), share)

    return Schedule(num_workers, None, build)


def _keep_and_take(peers: IntArray, share: float) -> Round:
    """Worker i keeps 1 − share and takes the share from peers[i] (mod n); from itself, it keeps."""
    num_workers = len(peers)
    workers = np.arange(num_workers)
    weights = np.repeat([1 - share, share], num_workers)
    columns = np.concatenate([workers, peers % num_workers])
    return Round(csr_array((weights, (np.tile(workers, 2), columns))))


def _pair_at(num_workers: int, distance: int, start: int) -> IntArray:
    """Partner of every worker when (i, i + distance) are paired greedily from `start` on."""
    partner = np.arange(num_workers)
    for worker in (np.arange(start, start + num_workers) % num_workers).tolist():
        other = (worker + distance) % num_workers
        if partner[worker] == worker and partner[other] == other:
            partner[worker], partner[other] = other, worker
    return partner


def _positive(value: int, name: str) -> int:
    if value < 1:
        raise UserError(f"{name} must be at least 1, got {value}")
    return value


def _check_nodes(num_workers: int, nodes: IntArray) -> int:
    """Return the number of nodes: a power of two, all of one size, numbered from 0."""
    sizes = np.bincount(nodes)
    num_nodes = len(sizes)
    if len(nodes) != num_workers or len(set(sizes.tolist())) != 1:
        raise UserError(
            f"aer needs a node for each of {num_workers} workers and nodes of one size, "
            f"got {len(nodes)} workers on nodes of {sizes.min()} to {sizes.max()}; "
            "set workers_per_node to a divisor of the number of workers"
        )
    if num_nodes & (num_nodes - 1):
        raise UserError(
            f"aer needs a power-of-two number of nodes, got {num_nodes} nodes of {sizes[0]} "
            "workers; change the number of nodes, or use base_graph, which takes any number"
        )
    return num_nodes
