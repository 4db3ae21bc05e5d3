"""Weight rules: from an adjacency matrix to a Round.

A rule takes an adjacency matrix (1.0 at [i, j] where worker i receives from j, nothing on the
diagonal) and returns a Round. Graphs take a rule as an argument, so every rule serves every graph.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from scipy.sparse import coo_array, csr_array, diags_array, eye_array

from gossamer.errors import UserError
from gossamer.topology.arrays import IntArray, Sparse
from gossamer.topology.partition import Partition
from gossamer.topology.round import Round


class WeightRule(Protocol):
    """A way to weigh the edges of a graph."""

    def __call__(self, adjacency: Sparse, /) -> Round:
        """Return the round on this graph."""
        ...


def uniform(adjacency: Sparse) -> Round:
    """W_ij = 1 / (k_i + 1) on itself and on each of the k_i workers that i receives from.

    Conserves the mean on regular graphs only; on others the round is declared not doubly
    stochastic.
    """
    hears = csr_array(adjacency + eye_array(adjacency.shape[0]))
    weights = csr_array(diags_array(1.0 / hears.sum(axis=1)) @ hears)
    return Round(weights, doubly_stochastic=_is_regular(adjacency))


def metropolis(adjacency: Sparse) -> Round:
    """W_ij = 1 / (1 + max(k_i, k_j)); each worker keeps the rest. Symmetric on every graph."""
    if (adjacency - adjacency.T).count_nonzero() > 0:
        raise UserError(
            "metropolis weights need an undirected graph, got one with one-way edges; "
            "use weights=uniform"
        )
    degrees = adjacency.sum(axis=1)
    rows, columns = adjacency.nonzero()
    shares = 1.0 / (1 + np.maximum(degrees[rows], degrees[columns]))
    others = csr_array(coo_array((shares, (rows, columns)), shape=adjacency.shape))
    return Round(csr_array(others + diags_array(1.0 - others.sum(axis=1))))


def by_degree(adjacency: Sparse) -> Round:
    """Uniform on regular graphs, metropolis on irregular ones: conserves the mean on both."""
    return uniform(adjacency) if _is_regular(adjacency) else metropolis(adjacency)


def group_average(labels: IntArray) -> Round:
    """Workers with the same label average: weight 1/g on every member of a group of g."""
    return Round.within(Partition(labels))


def nobody(num_workers: int) -> Round:
    """The identity, the round of a local step: every worker keeps its parameters."""
    return group_average(np.arange(num_workers))


def damped(round: Round, gamma: float) -> Round:
    """Return γW + (1 − γ)I: every worker moves the fraction γ of the way W would move it.

    >>> from gossamer.topology import complete
    >>> damped(complete(2), 0.5).matrix().toarray().tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    if not 0 <= gamma <= 1:
        raise UserError(f"damping needs gamma in [0, 1], got {gamma}; 1 is the round itself")
    kept = eye_array(round.num_workers, format="csr")
    weights = csr_array(gamma * round.matrix() + (1 - gamma) * kept)
    return Round(weights, doubly_stochastic=round.conserves_mean)


def pushed(round: Round) -> Round:
    """Return the column-stochastic round on the same graph, which push-sum needs.

    P_ji = 1 / (k_i + 1) for i itself and each of the k_i workers that it sends to: columns sum to
    one, so the sum over workers is conserved. A round that has this already is returned unchanged.

    >>> from gossamer.topology import from_matrix
    >>> one_way = from_matrix([[1.0, 0.0], [0.5, 0.5]], doubly_stochastic=False)
    >>> pushed(one_way).matrix().toarray().tolist()
    [[0.5, 0.0], [0.5, 1.0]]
    """
    if round.conserves_mean:
        return round
    takes = round.matrix()
    takes.data = np.ones_like(takes.data)
    takes = csr_array(takes.maximum(eye_array(round.num_workers)))
    return Round(csr_array(takes @ diags_array(1.0 / takes.sum(axis=0))), column_stochastic=True)


def _is_regular(adjacency: Sparse) -> bool:
    """Whether every worker has the same number of senders and of receivers."""
    degrees = np.concatenate([adjacency.sum(axis=0), adjacency.sum(axis=1)])
    return bool(np.all(degrees == degrees[0]))
