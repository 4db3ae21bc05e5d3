"""The Base-(k+1) graph: rounds of degree <= k whose product is the exact average, for any n.

Takezawa et al., Beyond exponential graph (https://arxiv.org/abs/2305.11420). Three constructions,
each built from the one before:

1. hyper-hypercube: n is a product of factors <= k + 1; one round per factor, in which cliques of
   that size average.
2. simple base graph: n in base k + 1 is Σ_l a_l (k+1)^{p_l}; block l holds a_l (k+1)^{p_l} workers.
   First every block averages internally. Then block 1 is bridged to all later blocks so that each
   of its a_1 parts, and the rest, have the global mean; block 2 to the blocks after it; and so on.
   A bridged part averages internally while later blocks are being bridged. Workers that would be
   idle average within their part instead: that conserves the mean, and mixes during training.
3. base graph: n = p·q with p the part of n that factors into numbers <= k + 1. Simple graphs on
   groups of q in parallel, then a hyper-hypercube across them, where that is shorter than 2.

A round is built as a list of disjoint pieces, each a small matrix on some of the workers; a worker
in no piece keeps its parameters.
"""

from __future__ import annotations

from functools import cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from gossamer.topology.arrays import FloatArray, IntArray
from gossamer.topology.round import Round


class _Piece(NamedTuple):
    """Disjoint groups of workers, one per row of `members`, that all mix by the same `weights`."""

    members: IntArray
    weights: FloatArray


def base_graph_rounds(num_workers: int, k: int) -> tuple[Round, ...]:
    """Return the rounds of one period."""
    workers = np.arange(num_workers)
    plan = min(_simple(workers, k), _factored(workers, k), key=len)
    return tuple(_to_round(num_workers, pieces) for pieces in plan) or (_to_round(num_workers, []),)


def _hyper_hypercube(workers: IntArray, k: int) -> list[list[_Piece]]:
    """Average `workers` exactly, one round per factor of their number."""
    rounds: list[list[_Piece]] = []
    stride = 1
    for factor in _fewest_factors(len(workers), k + 1) or ():
        cliques = workers.reshape(-1, factor, stride).swapaxes(1, 2).reshape(-1, factor)
        rounds.append([_Piece(cliques, np.full((factor, factor), 1 / factor))])
        stride *= factor
    return rounds


def _simple(workers: IntArray, k: int) -> list[list[_Piece]]:
    if _fewest_factors(len(workers), k + 1) is not None:
        return _hyper_hypercube(workers, k)
    blocks = _digits(workers, k)
    inside = [_hyper_hypercube(block.ravel(), k) for block in blocks]
    rounds = _in_parallel([_repeat(cubes, len(inside[0])) for cubes in inside])
    # Block l takes part in the bridges of the blocks before it, then in its own; after that its
    # parts only average internally. The first block takes longest.
    num_steps = 1 + len(_hyper_hypercube(blocks[0][0], k))
    tracks: list[list[list[_Piece]]] = []
    for index, parts in enumerate(blocks):
        track: list[list[_Piece]] = [[] for _ in range(index)]
        if index < len(blocks) - 1:
            later = np.concatenate([b.ravel() for b in blocks[index + 1 :]])
            track.append([_bridge(parts, later), *_cliques(parts[:, len(later) :], k)])
        finish = _in_parallel([_hyper_hypercube(part, k) for part in parts])
        tracks.append(track + _repeat(finish, num_steps - len(track)))
    return rounds + _in_parallel(tracks)


def _factored(workers: IntArray, k: int) -> list[list[_Piece]]:
    smooth = max(
        d
        for d in range(1, len(workers) + 1)
        if len(workers) % d == 0 and _fewest_factors(d, k + 1) is not None
    )
    groups = workers.reshape(smooth, -1)
    inside = _in_parallel([_simple(group, k) for group in groups])
    across = _in_parallel([_hyper_hypercube(column, k) for column in groups.T])
    return inside + across


def _bridge(parts: IntArray, later: IntArray) -> _Piece:
    """Give every part of a uniform block, and all later workers together, the mean of them all.

    Each later worker exchanges with one worker of each part. With s workers to a part and T in
    all, a block worker gives weight s/T to the later one, which keeps (later)/T.
    """
    num_parts, size = parts.shape
    total = parts.size + len(later)
    share = size / total
    weights = np.eye(num_parts + 1) * (1 - share)
    weights[-1, :-1] = weights[:-1, -1] = share
    weights[-1, -1] = 1 - num_parts * share
    return _Piece(np.column_stack([*parts[:, : len(later)], later]), weights)


def _cliques(parts: IntArray, k: int) -> list[_Piece]:
    """Let workers of the same part average in cliques of k + 1; the last one may be smaller."""
    whole = parts.shape[1] // (k + 1) * (k + 1)
    groups = (parts[:, :whole].reshape(-1, k + 1), parts[:, whole:])
    return [
        _Piece(members, np.full((size, size), 1 / size))
        for members in groups
        if (size := members.shape[1]) > 1 and len(members)
    ]


def _repeat(rounds: list[list[_Piece]], num_steps: int) -> list[list[_Piece]]:
    """Return the rounds cycled to ``num_steps``; an empty list stays empty."""
    return [rounds[step % len(rounds)] for step in range(num_steps)] if rounds else []


def _digits(workers: IntArray, k: int) -> list[IntArray]:
    """Split workers by the digits of their number in base k + 1: arrays [a_l, (k+1)^p_l]."""
    blocks: list[IntArray] = []
    start, size = 0, 1
    while size * (k + 1) <= len(workers):
        size *= k + 1
    while size:
        digit = (len(workers) - start) // size
        if digit:
            blocks.append(workers[start : start + digit * size].reshape(digit, size))
        start += digit * size
        size //= k + 1
    return blocks


def _in_parallel(tracks: list[list[list[_Piece]]]) -> list[list[_Piece]]:
    """Run sequences of rounds on disjoint workers at the same time."""
    return [
        [piece for pieces in step for piece in pieces]
        for step in zip_longest(*tracks, fillvalue=[])
    ]


@cache
def _fewest_factors(number: int, largest: int) -> tuple[int, ...] | None:
    """Return the shortest factorization into numbers <= largest, or None where there is none."""
    if number == 1:
        return ()
    options = [
        (factor, *rest)
        for factor in range(2, min(number, largest) + 1)
        if number % factor == 0 and (rest := _fewest_factors(number // factor, largest)) is not None
    ]
    return min(options, key=len, default=None)


def _to_round(num_workers: int, pieces: list[_Piece]) -> Round:
    rows, columns, values = [], [], []
    resting = np.ones(num_workers, dtype=bool)
    for members, weights in pieces:
        num_groups, size = members.shape
        rows.append(np.repeat(members, size, axis=1).ravel())
        columns.append(np.tile(members, (1, size)).ravel())
        values.append(np.tile(weights.ravel(), num_groups))
        resting[members] = False
    keep = np.flatnonzero(resting)
    index = np.concatenate([*rows, keep]), np.concatenate([*columns, keep])
    data = np.concatenate([*values, np.ones(len(keep))])
    return Round(csr_array((data, index), shape=(num_workers, num_workers)))
