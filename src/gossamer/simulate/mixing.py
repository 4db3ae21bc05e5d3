"""x ← W x on stacked tensors, for any Round, in place.

The kernel is the one with the fewest passes over memory: none for the identity, a mean where all
workers average, means of shifted rows for circulant rounds of low degree (rings, exponential
graphs), a dense product where rows are full, a sparse product otherwise.
"""

# W: workers, N: numbers per worker

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import UserError
from gossamer.topology import Round

_BLOCK_BYTES = 3 << 20
"""Products run on blocks of columns of this size, so that a block and its result fit in cache."""

_MOST_SHIFTS = 9
"""Measured at 256 and 1008 workers: up to this degree, averaging shifted rows beats a sparse
product."""

_DENSE_SHARE = 1 / 8
"""Measured at 1008 workers: above this density a dense product beats a sparse one."""

_KERNELS_KEPT = 64

MixKernel: TypeAlias = Callable[[Tensor], None]
"""Mixes x_WN in place."""

_RowsFrom: TypeAlias = tuple[slice, list[slice]]
"""Some rows, and the rows that mix into them, by shift."""


@torch.no_grad()
def mix_(stacked: Tensor, round: Round) -> None:
    """Mix in place: row i becomes Σ_j W_ij row j.

    Args:
        stacked: [W, ...], contiguous; a row per worker.
        round: on W workers.
    """
    check_round(round, stacked.shape[0])
    _kernel_of(round, stacked.dtype, stacked.device)(stacked.view(stacked.shape[0], -1))


def check_round(round: Round, num_workers: int) -> None:
    """Raise unless a round is on as many workers."""
    if round.num_workers != num_workers:
        raise UserError(
            f"a round must be on the {num_workers} workers that it mixes, got one on "
            f"{round.num_workers}; build it for {num_workers}"
        )


@lru_cache(_KERNELS_KEPT)
def _kernel_of(round: Round, dtype: torch.dtype, device: torch.device) -> MixKernel:
    if round.averages_all:
        return partial(_by_columns, _mean)
    shifts = _shifts(round)
    if shifts == [(0, 1.0)]:  # as between the averages of local SGD
        return _nothing
    if 1 < len(shifts) <= _MOST_SHIFTS:
        return _shift_kernel(round.num_workers, shifts)
    w = round.matrix()
    if w.nnz >= _DENSE_SHARE * round.num_workers**2:
        dense = torch.from_numpy(w.toarray()).to(device, dtype)
        return partial(_by_columns, partial(torch.matmul, dense))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        sparse = torch.sparse_csr_tensor(
            torch.from_numpy(w.indptr.astype(np.int64)),
            torch.from_numpy(w.indices.astype(np.int64)),
            torch.from_numpy(w.data.copy()),
            size=w.shape,
            dtype=dtype,
            device=device,
            check_invariants=True,
        )
    return partial(_by_columns, partial(_sparse_product, sparse))


def _shifts(round: Round) -> list[tuple[int, float]]:
    """Return (s, weight) with W[i, i + s mod n] = weight for all i, or [] where rows differ."""
    if round.shifts is None:
        return []
    (distances, weights), n = round.shifts, round.num_workers
    nearest = (distances + n // 2) % n - n // 2  # backwards where that is nearer
    return list(zip(nearest.tolist(), weights.tolist(), strict=True))


def _nothing(x_WN: Tensor) -> None:
    """The identity: every worker keeps its parameters."""


def _by_shifts(own: float, shares: list[float], parts: list[_RowsFrom], x_WN: Tensor) -> None:
    """Mix rows at the same distances: first the neighbours' mean, then a lerp with the own row.

    A running mean by ``lerp``, as weights sum to 1: fewer passes over memory than products and
    sums.

    Args:
        own: the weight of a worker's own row.
        shares: of each neighbour but the first, in the mean of it and those before it.
        parts: rows, and where they come from by each shift.
        x_WN: mixed in place.
    """
    for block in _columns(x_WN):
        # Into a buffer: a row written in place would reach its neighbours already mixed.
        mean = torch.empty_like(block)
        for rows, (first, *rest) in parts:
            into, sofar = mean[rows], block[first]
            for share, source in zip(shares, rest, strict=True):
                sofar = torch.lerp(sofar, block[source], share, out=into)
            if not rest:
                into.copy_(sofar)
        block.lerp_(mean, 1 - own)


def _shift_kernel(num_workers: int, shifts: list[tuple[int, float]]) -> MixKernel:
    own = sum(weight for shift, weight in shifts if shift == 0)
    others = [(shift, weight) for shift, weight in shifts if shift != 0]
    totals = accumulate(weight for _, weight in others)
    shares = [weight / total for (_, weight), total in zip(others, totals, strict=True)]
    parts = _without_wrap(num_workers, [shift for shift, _ in others])
    return partial(_by_shifts, own, shares[1:], parts)


def _without_wrap(n: int, shifts: list[int]) -> list[_RowsFrom]:
    """Split rows where a shift wraps around; return each part, and its source by each shift.

    >>> _without_wrap(5, [1, -1])[0]
    (slice(0, 1, None), [slice(1, 2, None), slice(4, 5, None)])
    """
    cuts = sorted({0, n, *(-shift % n for shift in shifts)})
    parts: list[_RowsFrom] = []
    for start, stop in pairwise(cuts):
        starts = [(start + shift) % n for shift in shifts]
        parts.append((slice(start, stop), [slice(s, s + stop - start) for s in starts]))
    return parts


def _by_columns(product: Callable[[Tensor], Tensor], x_WN: Tensor) -> None:
    for block in _columns(x_WN):
        block.copy_(product(block))


def _columns(x_WN: Tensor) -> Sequence[Tensor]:
    columns = max(1, _BLOCK_BYTES // (x_WN.shape[0] * x_WN.element_size()))
    return x_WN.split(columns, dim=1)


def _mean(x_WN: Tensor) -> Tensor:
    return x_WN.mean(0)


def _sparse_product(w_WW: Tensor, x_WN: Tensor) -> Tensor:
    return w_WW @ x_WN.contiguous()
