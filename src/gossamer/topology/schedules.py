"""Schedules: which round is used at which step.

A schedule is a number of workers, a period and a function from the step to a Round. Rounds are
built lazily and cached, so that a schedule with a thousand rounds costs nothing until it runs. Each
rank builds its own: the same arguments must give the same rounds, or ranks wait for messages that
were never sent.

With one peer j a worker averages, x_i ← (x_i + x_j)/2, but for EquiTopo; in a group of g every
member has weight 1/g. A worker without a peer is idle: x_i ← x_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, final

import numpy as np
from scipy.sparse import csr_array

from gossamer.errors import UserError, quoted
from gossamer.topology.arrays import IntArray
from gossamer.topology.finite_time import base_graph_rounds
from gossamer.topology.graphs import (
    check_messages,
    check_seed,
    check_workers,
    complete,
    lattice,
    log2_of,
    powers_of_two_below,
)
from gossamer.topology.round import Round
from gossamer.topology.weights import group_average, nobody

_ROUNDS_KEPT = 64

MAX_EVERY = 2**14
"""Bounds the period, which ``rounds_to_consensus`` walks through."""


MAX_FRAGMENTS = 1024


@final
@dataclass(frozen=True, eq=False)
class Schedule:
    """The round of every step.

    Args:
        num_workers: how many workers take part in every round.
        period: the number of steps after which rounds repeat, or None where they never do.
        build: returns the round of a step in 0..period − 1 (of any step where period is None).
        name: what reports call it; ``parse`` sets it to a string that parses to the same schedule.
        counts: what advances the schedule where not every step exchanges: the ``"exchanges"`` made
            so far, or for a schedule of training time, such as Ada, the ``"steps"``.
    """

    num_workers: int
    period: int | None
    build: Callable[[int], Round] = field(repr=False)
    name: str = "custom"
    counts: Literal["exchanges", "steps"] = "exchanges"
    _kept: Callable[[int], Round] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_workers(self.num_workers)
        if self.period is not None and self.period < 1:
            raise UserError(
                f"a period must be at least one round, got {self.period}; "
                "use None for rounds that never repeat"
            )
        object.__setattr__(self, "_kept", lru_cache(_ROUNDS_KEPT)(self.build))

    def round(self, step: int) -> Round:
        """Return the round that step t (from 0) mixes with."""
        if step < 0:
            raise UserError(f"steps count from 0, got {step}; the first step is step 0")
        round = self._kept(step if self.period is None else step % self.period)
        if round.num_workers != self.num_workers:
            raise UserError(
                f"a round of {self.name} must be on {self.num_workers} workers, got one on "
                f"{round.num_workers} at step {step}; build all rounds for the same workers"
            )
        return round


def static(round: Round) -> Schedule:
    """The same round at every step."""
    if not round.is_connected:
        raise UserError(
            "a static schedule needs a connected graph, got one that leaves workers unreachable; "
            "add edges, or alternate several rounds with topology.cycle"
        )
    return cycle([round])


def cycle(rounds: Sequence[Round]) -> Schedule:
    """The given rounds in turn, repeated."""
    kept = tuple(rounds)
    sizes = sorted({r.num_workers for r in kept})
    if len(sizes) != 1:
        raise UserError(
            f"a cycle needs rounds that are all on the same number of workers, got {len(kept)} "
            f"rounds on {sizes or 'no'} workers; build them for one number"
        )
    return Schedule(sizes[0], len(kept), kept.__getitem__)


def spaced(schedule: Schedule, every: int) -> Schedule:
    """The rounds of a schedule at one step in ``every``, with local steps in between.

    W_t is the identity unless t + 1 is a multiple of ``every``. A schedule that counts exchanges
    uses its next round at each of them; indexed by the step, one-peer exponential on 16 workers
    would use the same one of its four rounds for ever at every = 4. On the complete graph this is
    local SGD.

    Args:
        schedule: any schedule.
        every: steps from one exchange to the next; 1 is the schedule itself.
    """
    if type(every) is not int or not 1 <= every <= MAX_EVERY:
        raise UserError(
            f"every must be an integer from 1 to {MAX_EVERY:,} steps, got {quoted(every)}; "
            "1 exchanges at every step"
        )
    if every == 1:
        return schedule
    local = nobody(schedule.num_workers)

    def build(step: int) -> Round:
        if (step + 1) % every:
            return local
        return schedule.round(step // every if schedule.counts == "exchanges" else step)

    period = schedule.period
    if period is not None:
        period = every * period if schedule.counts == "exchanges" else math.lcm(every, period)
    name = f"{schedule.name}, every {every} steps"
    return Schedule(schedule.num_workers, period, build, name, schedule.counts)


def in_turns(schedule: Schedule, fragments: int) -> Schedule:
    """The rounds of a schedule where each exchange sends one fragment of the parameters, in turn.

    Each fragment advances the schedule by its own exchanges, so that each round is used once per
    fragment. A schedule of training time is returned unchanged.

    Args:
        schedule: any schedule.
        fragments: how many; 1 is the schedule itself.
    """
    if type(fragments) is not int or not 1 <= fragments <= MAX_FRAGMENTS:
        raise UserError(
            f"fragments must be an integer from 1 to {MAX_FRAGMENTS:,}, got "
            f"{quoted(fragments)}; 1 exchanges all parameters at once"
        )
    if fragments == 1 or schedule.counts == "steps":
        return schedule
    period = None if schedule.period is None else fragments * schedule.period
    name = f"{schedule.name}, {fragments} fragments in turn"
    return Schedule(
        schedule.num_workers, period, lambda step: schedule.round(step // fragments), name
    )


def one_peer_ring(num_workers: int) -> Schedule:
    """Alternating pairs on a ring: (0,1)(2,3)…, then (1,2)(3,4)…; on an odd ring one is idle."""
    check_workers(num_workers)

    def build(step: int) -> Round:
        # Index of each worker's pair when pairing starts at worker `step`. On an odd ring the last
        # worker is left without a peer; its pair has one member.
        return group_average((np.arange(num_workers) - step) % num_workers // 2)

    return Schedule(num_workers, 2 if num_workers % 2 == 0 else num_workers, build)


def one_peer_exponential(num_workers: int, pairs: bool = False) -> Schedule:
    """Step t: i receives from i + 2^t (mod n), or pairs at that distance; exact for n = 2^m.

    Args:
        num_workers: any number for the directed form, a power of two for pairs.
        pairs: exchange with one peer, instead of sending to one and receiving from another. Gives
            the same rounds as ``one_peer_hypercube``.
    """
    check_workers(num_workers)
    if pairs:
        return one_peer_hypercube(num_workers)
    distances = powers_of_two_below(max(2, num_workers))  # one worker is its own peer
    workers = np.arange(num_workers)

    def build(step: int) -> Round:
        return _keep_and_take(workers + distances[step], share=0.5)

    return Schedule(num_workers, len(distances), build)


def one_peer_hypercube(num_workers: int) -> Schedule:
    """Step t: pairs that differ in bit t of their index; the exact average after log2 n steps."""
    num_bits = log2_of(num_workers, "one_peer_hypercube", "one_peer_exponential")

    def build(step: int) -> Round:
        return group_average(np.arange(num_workers) & ~(1 << step))

    return Schedule(num_workers, max(1, num_bits), build)


def random_matching(num_workers: int, seed: int = 0) -> Schedule:
    """A new random pairing at every step; with an odd number of workers one is idle."""
    check_workers(num_workers)
    check_seed(seed)

    def build(step: int) -> Round:
        order = np.random.default_rng((seed, step)).permutation(num_workers)
        return group_average(order // 2)

    return Schedule(num_workers, None, build)


def aer(num_workers: int, workers_per_node: int) -> Schedule:
    """Alternating exponential ring: half of the node pairs average across, half inside nodes.

    Worker i is on node i // workers_per_node, as torchrun numbers ranks; ``aer_on_nodes`` takes any
    other mapping.

    Args:
        num_workers: workers_per_node times a power of two.
        workers_per_node: how many consecutive workers share a node.
    """
    check_workers(num_workers)
    _positive(workers_per_node, "aer", "workers_per_node")
    if num_workers % workers_per_node and num_workers > 1:
        raise UserError(
            f"aer needs full nodes, got {num_workers} workers for nodes of {workers_per_node}; "
            "set workers_per_node to a divisor of the number of workers"
        )
    return aer_on_nodes([worker // workers_per_node for worker in range(num_workers)])


def aer_on_nodes(node_of: Sequence[int]) -> Schedule:
    """Alternating exponential ring, where worker i is on node node_of[i].

    Level r pairs the nodes that differ in bit r, and takes two steps: in the first the
    odd-numbered pairs average over both nodes while the nodes of even-numbered pairs average
    internally; in the second the roles swap. Exact after one period of 2·log2(nodes) steps.

    Args:
        node_of: nodes 0..M − 1 with M a power of two, all with the same number of workers.

    Reference: Wang et al., From promise to practice (https://arxiv.org/abs/2410.11998).
    """
    nodes = _check_nodes(node_of)
    num_workers, num_nodes = len(nodes), int(nodes.max()) + 1
    if num_nodes == 1:
        return static(complete(num_workers))

    def build(step: int) -> Round:
        level, second = divmod(step, 2)
        bit = 1 << level
        first_of_pair = nodes & ~bit
        # Number the pairs 1, 2, … by their first node: squeeze the paired bit out of its index.
        number = (first_of_pair >> (level + 1) << level) + (first_of_pair & (bit - 1)) + 1
        across = number % 2 == 1 - second
        return group_average(np.where(across, first_of_pair, nodes))

    return Schedule(num_workers, 2 * (num_nodes.bit_length() - 1), build)


def base_graph(num_workers: int, k: int = 1) -> Schedule:
    """Base-(k+1) graph: the exact average in finite time on any number of workers, degree <= k.

    Reference: Takezawa et al., Beyond exponential graph (https://arxiv.org/abs/2305.11420).
    """
    check_workers(num_workers)
    _positive(k, "base_graph", "k")
    check_messages(num_workers * min(k, num_workers - 1))
    return cycle(base_graph_rounds(num_workers, k))


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
    workers left without a peer are idle.
    """

    def peers(distance: int, rng: np.random.Generator) -> IntArray:
        return _pair_at(num_workers, distance, start=int(rng.integers(num_workers)))

    return _equidyn(num_workers, eta, seed, peers)


def ada(num_workers: int, k0: int, gamma: float, steps_per_epoch: int) -> Schedule:
    """A ring lattice that thins out: k(epoch) = max(k0 − int(γ·epoch), 2).

    k >= n − 1 is the complete graph; any other odd k is floored to even.

    Args:
        num_workers: any number.
        k0: neighbours in the first epoch.
        gamma: neighbours lost per epoch.
        steps_per_epoch: steps after which the epoch counts up.

    Reference: Xie et al., Scaling up data parallelism (https://arxiv.org/abs/2509.12213).
    """
    check_workers(num_workers)
    _positive(steps_per_epoch, "ada", "steps_per_epoch")
    if k0 < 2 or not 0 <= gamma < math.inf:
        raise UserError(
            f"ada needs k0 >= 2 and a finite gamma >= 0, got k0={quoted(k0)}, gamma={gamma}; "
            "k0=10, gamma=0.02 is the paper's choice for 96 workers and 300 epochs"
        )

    @lru_cache(_ROUNDS_KEPT)
    def with_degree(k: int) -> Round:
        if k >= num_workers - 1:
            return complete(num_workers)
        return lattice(num_workers, k - k % 2)

    def build(step: int) -> Round:
        return with_degree(max(k0 - int(gamma * (step // steps_per_epoch)), 2))

    return Schedule(num_workers, None, build, counts="steps")


def _equidyn(
    num_workers: int,
    eta: float,
    seed: int,
    peers: Callable[[int, np.random.Generator], IntArray],
) -> Schedule:
    check_workers(num_workers)
    check_seed(seed)
    if not 0 < eta <= 1:
        raise UserError(f"equidyn needs 0 < eta <= 1, got eta={eta}; the paper uses 0.5")
    share = eta * (num_workers - 1) / num_workers

    def build(step: int) -> Round:
        rng = np.random.default_rng((seed, step))
        distance = int(rng.integers(1, max(2, num_workers)))
        return _keep_and_take(peers(distance, rng), share)

    return Schedule(num_workers, None, build)


def _keep_and_take(peers: IntArray, share: float) -> Round:
    """Worker i has weight 1 − share on itself and share on peers[i] (mod n), which may be i."""
    num_workers = len(peers)
    workers = np.arange(num_workers)
    weights = np.repeat([1 - share, share], num_workers)
    columns = np.concatenate([workers, peers % num_workers])
    return Round(csr_array((weights, (np.tile(workers, 2), columns))))


def _pair_at(num_workers: int, distance: int, start: int) -> IntArray:
    """Peer of every worker when (i, i + distance) are paired greedily from `start` on."""
    peer = np.arange(num_workers)
    for worker in (np.arange(start, start + num_workers) % num_workers).tolist():
        other = (worker + distance) % num_workers
        if peer[worker] == worker and peer[other] == other:
            peer[worker], peer[other] = other, worker
    return peer


def _positive(value: int, what: str, name: str) -> None:
    if value < 1:
        raise UserError(f"{what} needs {name} of at least 1, got {value}; 1 is the smallest")


def _check_nodes(node_of: Sequence[int]) -> IntArray:
    """Return the node of each worker, checked: 0..M − 1, M a power of two, all of one size."""
    nodes = np.asarray(node_of)
    if nodes.ndim != 1 or nodes.size == 0 or nodes.dtype.kind not in "iu" or nodes.min() < 0:
        raise UserError(
            f"aer needs a node index for each worker, got {node_of!r}; number nodes from 0"
        )
    sizes = np.bincount(nodes)
    if len(set(sizes.tolist())) != 1:
        raise UserError(
            f"aer needs nodes 0, 1, … with the same number of workers each, got nodes of "
            f"{sizes.min()} to {sizes.max()}; number nodes without gaps and fill them evenly"
        )
    num_nodes = len(sizes)
    if num_nodes & (num_nodes - 1):
        raise UserError(
            f"aer needs a power-of-two number of nodes, got {num_nodes} nodes of {sizes[0]} "
            "workers; change the number of nodes, or use base_graph, which takes any number"
        )
    return nodes.astype(np.int64)
