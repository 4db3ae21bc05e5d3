"""Graphs: each function returns one Round on any valid number of workers.

All are undirected but ``exponential``. The default weights are uniform where the graph is regular
and metropolis where it is not; ``weights=`` takes any rule of ``topology.weights``. Every graph
accepts one worker: its round is the identity.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array, csr_array

from gossamer.errors import UserError, quoted
from gossamer.topology.arrays import IntArray, Sparse
from gossamer.topology.mixing_matrix import is_connected
from gossamer.topology.partition import Partition
from gossamer.topology.round import Round
from gossamer.topology.weights import WeightRule, by_degree, uniform

MAX_WORKERS = 2**17
"""More workers would take minutes to analyse."""

MAX_MESSAGES = 2**24
"""The most messages in one round: about a gigabyte of edges."""

_MAX_DRAWN = 2**20
"""The most messages of a random regular graph, whose edges are drawn one by one."""

_MAX_DRAWS = 100


def ring(num_workers: int, *, weights: WeightRule = by_degree) -> Round:
    """Neighbours i ± 1."""
    return weights(_circulant(num_workers, np.array([-1, 1])))


def torus(num_workers: int, *, weights: WeightRule = by_degree) -> Round:
    """Two-dimensional wrapped grid, as square as the number of workers allows."""
    rows, columns = _most_square(num_workers)
    grid = np.arange(num_workers).reshape(rows, columns)
    sides = [np.roll(grid, shift, axis).ravel() for shift in (-1, 1) for axis in (0, 1)]
    return weights(_adjacency(num_workers, np.tile(grid.ravel(), 4), np.concatenate(sides)))


def lattice(num_workers: int, k: int, *, weights: WeightRule = by_degree) -> Round:
    """Ring lattice: neighbours i ± 1 … i ± k/2."""
    check_workers(num_workers)
    if k < 2 or k % 2 or k >= num_workers > 1:
        best = min(k + k % 2, num_workers - 1 - (num_workers - 1) % 2)
        remedy = f"use k={best}" if k >= 2 and best >= 2 else "use ring or complete"
        raise UserError(
            f"lattice needs an even k, at least 2 and less than its {num_workers} workers, "
            f"got k={k}; {remedy}"
        )
    check_messages(num_workers * k)
    reach = np.arange(1, k // 2 + 1)
    return weights(_circulant(num_workers, np.concatenate([-reach, reach])))


def exponential(num_workers: int, *, weights: WeightRule = by_degree) -> Round:
    """Directed: i receives from i + 1, i + 2, i + 4, … (mod n)."""
    return weights(_circulant(num_workers, powers_of_two_below(num_workers)))


def hypercube(num_workers: int, *, weights: WeightRule = by_degree) -> Round:
    """Neighbours differ in one bit of their index; needs a power of two."""
    flips = 1 << np.arange(log2_of(num_workers, "hypercube", "exponential"))
    workers = np.arange(num_workers)
    others = workers ^ flips[:, None]
    return weights(_adjacency(num_workers, np.tile(workers, len(flips)), others.ravel()))


def complete(num_workers: int, *, weights: WeightRule = by_degree) -> Round:
    """Everyone with everyone: one round is the exact average."""
    check_workers(num_workers)
    if weights in (by_degree, uniform):  # 1/n on everyone, without n² edges to weigh
        return Round.within(Partition.whole(num_workers))
    check_messages(num_workers * (num_workers - 1))
    return weights(_circulant(num_workers, np.arange(1, num_workers)))


def star(num_workers: int, *, weights: WeightRule = by_degree) -> Round:
    """Everyone with worker 0."""
    check_workers(num_workers)
    return weights(
        _undirected(num_workers, np.zeros(num_workers, dtype=np.int64), np.arange(num_workers))
    )


def erdos_renyi(
    num_workers: int, p: float, seed: int = 0, *, weights: WeightRule = by_degree
) -> Round:
    """Each pair is linked with probability p; the first connected draw of the seed."""
    check_workers(num_workers)
    if not 0 <= p <= 1:
        raise UserError(f"erdos_renyi needs p in [0, 1], got p={p}; p is the share of linked pairs")
    check_messages(round(p * num_workers * (num_workers - 1)))
    rng = np.random.default_rng(check_seed(seed))
    num_pairs = num_workers * (num_workers - 1) // 2
    for _ in range(_MAX_DRAWS):
        pairs = rng.choice(num_pairs, rng.binomial(num_pairs, p), replace=False, shuffle=False)
        graph = _undirected(num_workers, *_decode_pairs(pairs))
        if is_connected(graph):
            return weights(graph)
    threshold = math.log(num_workers) / num_workers
    raise UserError(
        f"erdos_renyi needs a p that connects {num_workers} workers, got p={p}: none of "
        f"{_MAX_DRAWS} draws was connected; use p well above ln(n)/n = {threshold:.3g}"
    )


def random_regular(
    num_workers: int, k: int, seed: int = 0, *, weights: WeightRule = by_degree
) -> Round:
    """Every worker has k neighbours, drawn at random; the first connected draw of the seed."""
    check_workers(num_workers)
    check_seed(seed)
    if num_workers == 1:
        return weights(_adjacency(1))
    if not 1 <= k < num_workers or num_workers * k % 2:
        best = min(k, num_workers - 1)
        best -= best * num_workers % 2
        raise UserError(
            f"random_regular needs k in 1..{num_workers - 1} and an even number of edge ends "
            f"{num_workers}*k, got k={k}; use {f'k={best}' if best > 1 else 'ring or complete'}"
        )
    check_messages(num_workers * k, _MAX_DRAWN)
    for draw in range(_MAX_DRAWS):
        graph = _draw_regular(num_workers, k, seed + draw * 1_000_003)
        if is_connected(graph):
            return weights(graph)
    raise UserError(
        f"random_regular needs a k that connects {num_workers} workers, got k={k}: none of "
        f"{_MAX_DRAWS} draws was connected; use k >= 3"
    )


def from_networkx(graph: Any, *, weights: WeightRule = by_degree) -> Round:
    """Any networkx graph; workers are its nodes in their order.

    An edge u → v of a directed graph means that u sends to v. Edge attributes are not read.
    """
    index = {node: worker for worker, node in enumerate(graph.nodes)}
    check_workers(len(index))
    edges = np.array([(index[u], index[v]) for u, v in graph.edges()], dtype=np.int64)
    sources, targets = edges.reshape(-1, 2).T
    build = _adjacency if graph.is_directed() else _undirected
    return weights(build(len(index), targets, sources))


def from_matrix(matrix: npt.ArrayLike | Sparse, *, doubly_stochastic: bool = True) -> Round:
    """Any mixing matrix, dense or sparse: W[i, j] is the weight worker i gives to worker j.

    Args:
        matrix: non-negative, rows that sum to one.
        doubly_stochastic: require columns that sum to one too; False declares that they do not.
    """
    given: Any = matrix
    try:
        weights: Any = csr_array(given)
    except (TypeError, ValueError):
        weights = None
    if weights is None or weights.dtype.kind not in "biuf":
        raise UserError(
            "a mixing matrix must be an array of real numbers with rows of equal length, got "
            f"{type(given).__name__}; give a list of rows, a numpy array or a scipy sparse matrix"
        )
    return Round(weights, doubly_stochastic=doubly_stochastic)


def powers_of_two_below(num_workers: int) -> IntArray:
    """The distances 1, 2, 4, … that are less than the number of workers."""
    check_workers(num_workers)
    return 1 << np.arange(int(num_workers - 1).bit_length())


def log2_of(num_workers: int, what: str, instead: str) -> int:
    """Return m where the number of workers is 2^m; raise where it is not a power of two."""
    check_workers(num_workers)
    exponent = int(num_workers).bit_length() - 1
    if num_workers != 1 << exponent:
        below = 1 << exponent
        raise UserError(
            f"{what} needs a power-of-two number of workers, got {num_workers}; "
            f"use {below} or {2 * below} workers, or {instead}"
        )
    return exponent


def check_workers(num_workers: int) -> None:
    """Raise unless there is at least one worker, and not more than can be analysed."""
    try:
        fits = 1 <= operator.index(num_workers) <= MAX_WORKERS
    except TypeError:  # not an integer
        fits = False
    if not fits or isinstance(num_workers, bool):
        raise UserError(
            f"a topology needs at least one worker, got {quoted(num_workers)}; "
            f"give an integer from 1 to {MAX_WORKERS:,}"
        )


def check_messages(count: int, most: int = MAX_MESSAGES) -> None:
    """Raise where a round would have more messages than fit in memory."""
    if count > most:
        raise UserError(
            f"a round of such a graph may have up to {most:,} messages, got {quoted(count)}; "
            "use fewer workers or neighbours, or complete, which does not store its edges"
        )


def check_seed(seed: int) -> int:
    """Return the seed, checked to be one that random generators accept."""
    if not 0 <= seed < 2**63:
        raise UserError(f"a seed must be at least 0, got {quoted(seed)}; use one below 2**63")
    return seed


def _circulant(num_workers: int, offsets: IntArray) -> Sparse:
    """Worker i receives from i + offset (mod n), for each offset."""
    check_workers(num_workers)
    workers = np.repeat(np.arange(num_workers), len(offsets))
    return _adjacency(num_workers, workers, workers + np.tile(offsets, num_workers))


def _undirected(num_workers: int, ends: IntArray, others: IntArray) -> Sparse:
    both = np.concatenate([ends, others]), np.concatenate([others, ends])
    return _adjacency(num_workers, *both)


def _adjacency(
    num_workers: int, receivers: npt.ArrayLike = (), senders: npt.ArrayLike = ()
) -> Sparse:
    """Return 1.0 at [receiver, sender] (mod n); duplicate edges merge, self-loops are removed."""
    to = np.asarray(receivers, dtype=np.int64) % num_workers
    by = np.asarray(senders, dtype=np.int64) % num_workers
    edge = to != by
    ones = np.ones(int(edge.sum()))
    graph = csr_array(coo_array((ones, (to[edge], by[edge])), shape=(num_workers, num_workers)))
    graph.sum_duplicates()
    graph.data[:] = 1.0
    return graph


def _most_square(num_workers: int) -> tuple[int, int]:
    check_workers(num_workers)
    rows = next(r for r in range(math.isqrt(num_workers), 0, -1) if num_workers % r == 0)
    if rows == 1 < num_workers:
        raise UserError(
            f"torus needs a number of workers that factors into rows x columns, got the prime "
            f"{num_workers}; use {max(4, num_workers + 1)} workers, or ring"
        )
    return rows, num_workers // rows


def _decode_pairs(codes: IntArray) -> tuple[IntArray, IntArray]:
    """Return the pairs (low, high), low < high, that codes high·(high − 1)/2 + low stand for."""
    high = np.floor((1 + np.sqrt(8.0 * codes + 1)) / 2).astype(np.int64)
    # The root can be off by one where 8c + 1 is not exact in floating point.
    high -= high * (high - 1) // 2 > codes
    high += high * (high + 1) // 2 <= codes
    return codes - high * (high - 1) // 2, high


def _draw_regular(num_workers: int, k: int, seed: int) -> Sparse:
    """Return one random k-regular graph, connected or not."""
    import networkx as nx  # slow to import, and needed here only

    sparse_k = min(k, num_workers - 1 - k)  # dense graphs are drawn as their complement
    drawn = nx.random_regular_graph(sparse_k, num_workers, seed=seed)
    graph = drawn if sparse_k == k else nx.complement(drawn)
    ends, others = np.array(graph.edges(), dtype=np.int64).reshape(-1, 2).T
    return _undirected(num_workers, ends, others)
