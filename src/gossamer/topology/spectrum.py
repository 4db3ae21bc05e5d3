"""How fast a topology reaches consensus.

A doubly stochastic round conserves the mean of the workers; everything here is about the rest, the
deviation W − J with J = 11ᵀ/n. Dense eigenvalues would be slow at a thousand workers, so each
quantity uses the cheapest structure available: the Fourier transform where rounds are circulant,
Lanczos where they are large and sparse, random starts for the decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import cast

import numpy as np
import numpy.typing as npt

from gossamer.errors import UserError
from gossamer.topology.arrays import FloatArray, Shifts, Sparse
from gossamer.topology.round import Round
from gossamer.topology.schedules import Schedule

_DENSE_BELOW = 1100
"""Up to this many workers dense linear algebra takes a fraction of a second and never fails."""

_NUM_STARTS = 64
"""Random starts that estimate the expectation above that number of workers."""

_MOST_MIXED = 2**23
"""Budget of ``rounds_to_consensus`` in workers times rounds: a few seconds."""

_EXACT = 1e-10
"""A product of rounds that is this close to J is J, up to rounding."""


def mixing_parameter(round: Round) -> float:
    """Return p = 1 − ‖W − J‖₂²: a round leaves at most 1 − p of the squared consensus error.

    >>> from gossamer.topology import ring
    >>> f"{mixing_parameter(ring(16)):.4f}"
    '0.0989'
    """
    return 1.0 - _deviation([round]) ** 2


def spectral_gap(round: Round) -> float:
    """Return 1 − |λ₂|, the gap between the largest and the second largest eigenvalue of W."""
    if round.symmetric or round.shifts is not None:  # normal: |λ₂| is the norm
        return 1.0 - _deviation([round])
    moduli = np.sort(np.abs(np.linalg.eigvals(round.matrix().toarray())))
    return 1.0 - float(moduli[-2])


def smallest_eigenvalue(round: Round) -> float:
    """Return λ_min of a round with symmetric weights.

    >>> from gossamer.topology import ring
    >>> f"{smallest_eigenvalue(ring(16)):.4f}"
    '-0.3333'
    """
    if not round.symmetric:
        raise UserError(
            "the smallest eigenvalue is that of symmetric weights, got others; use metropolis "
            "weights on an undirected graph"
        )
    if round.shifts is not None:
        return float(_circulant_eigenvalues([round.shifts], round.num_workers).real.min())
    if round.num_workers <= _DENSE_BELOW:
        return float(np.linalg.eigvalsh(round.matrix().toarray())[0])
    from scipy.sparse.linalg import eigsh  # slow to import

    start = _random_starts(round.num_workers, 1).ravel()
    return float(eigsh(round.matrix(), k=1, which="SA", v0=start, return_eigenvectors=False)[0])


def contraction(schedule: Schedule, steps: int | None = None) -> float:
    """Return ‖W_T … W_1 − J‖₂: the factor of the worst-case consensus error after T rounds.

    T is ``steps``, by default the period, or ``window(schedule)`` where there is none. Values below
    1e-10 may be returned as 0.
    """
    num_rounds = steps if steps is not None else schedule.period or window(schedule)
    if num_rounds < 1:
        raise UserError(f"a contraction is over at least one round, got {num_rounds}; give steps=1")
    return _deviation([schedule.round(step) for step in range(num_rounds)])


def mixing_rate(schedule: Schedule) -> float:
    """Return the p of a static round with the same contraction per round.

    p = 1 − ‖W_T … W_1 − J‖₂^{2/T} over T = ``window(schedule)`` rounds; of one round it is
    ``mixing_parameter``.
    """
    num_rounds = window(schedule)
    return 1.0 - contraction(schedule, num_rounds) ** (2.0 / num_rounds)


def window(schedule: Schedule) -> int:
    """Return over how many rounds a schedule is measured: its period, at most 3 per bit of n.

    Enough to mix, and few enough that the error of a good topology stays above rounding.
    """
    limit = 3 * int(schedule.num_workers).bit_length()
    return min(schedule.period or limit, limit)


def rounds_to_consensus(schedule: Schedule) -> int | None:
    """Return the least T with W_T … W_1 = J: rounds from step 0 until all workers have their mean.

    None means asymptotic: the error only shrinks. Exact means that one round takes it down to
    rounding. The search covers two periods, at least 64 rounds, and stops when the error is below
    1e-9 of its start, where the two cannot be told apart. With many workers it mixes at most
    max(64, 2²³/n) rounds; local steps do not count.
    """
    _check_mean([schedule.round(step) for step in range(window(schedule))])
    state = _random_starts(schedule.num_workers, num_starts=4)
    first = error = _norm_of_deviation(state)
    if error == 0:
        return 0
    mixed, most = 0, max(64, _MOST_MIXED // schedule.num_workers)
    for step in range(max(64, 2 * (schedule.period or 0))):
        round = schedule.round(step)
        if not round.degree:
            continue
        if mixed == most:
            return None
        mixed += 1
        state = _mix(round, state)
        previous, error = error, _norm_of_deviation(state)
        if error <= 1e-13 * first and error <= 1e-3 * previous:
            return step + 1
        if error <= 1e-9 * first:
            return None
    return None


def consensus_decay(schedule: Schedule, steps: int) -> FloatArray:
    """Return E_t / E_0 for t = 1..steps, with E the expected squared distance to the workers' mean.

    From a random start it is (‖W_t … W_1‖_F² − 1) / (n − 1) for doubly stochastic rounds; above
    1100 workers it is estimated by 64 seeded random starts.
    """
    num_workers = schedule.num_workers
    if num_workers == 1:
        return np.zeros(steps)
    dense = num_workers <= _DENSE_BELOW
    state = np.eye(num_workers) if dense else _random_starts(num_workers, _NUM_STARTS)
    first = _norm_of_deviation(state)
    errors = np.empty(steps)
    for step in range(steps):
        state = _mix(schedule.round(step), state)
        errors[step] = (_norm_of_deviation(state) / first) ** 2
    return np.where(errors < _EXACT**2, 0.0, errors)


def _random_starts(num_workers: int, num_starts: int) -> FloatArray:
    return np.random.default_rng(0).standard_normal((num_workers, num_starts))


def _norm_of_deviation(state: FloatArray) -> float:
    return float(np.linalg.norm(state - state.mean(axis=0)))


def _mix(round: Round, state: FloatArray) -> FloatArray:
    if round.partition is not None:
        return round.mixed(state)
    weights = round.matrix()
    crowded = weights.nnz > 0.05 * round.num_workers**2
    return cast(FloatArray, (weights.toarray() if crowded else weights) @ state)


def _check_mean(rounds: Sequence[Round]) -> None:
    if not all(round.conserves_mean for round in rounds):
        raise UserError(
            "mixing speed is defined for doubly stochastic rounds, got one that does not conserve "
            "the mean; use metropolis weights"
        )


def _deviation(rounds: Sequence[Round]) -> float:
    """Return ‖W_T … W_1 − J‖₂ of the rounds, first to last."""
    _check_mean(rounds)
    num_workers = rounds[0].num_workers
    # A product with J in it is J: doubly stochastic rounds before and after it change nothing.
    if any(round.averages_all for round in rounds):
        return 0.0
    shifts = [round.shifts for round in rounds if round.shifts is not None]
    if len(shifts) == len(rounds):
        return _circulant_deviation(shifts, num_workers)
    if num_workers > _DENSE_BELOW:
        return _lanczos([round.matrix() for round in rounds])
    product = reduce(lambda state, round: _mix(round, state), rounds, np.eye(num_workers))
    deviation = product - 1.0 / num_workers
    exact = np.linalg.norm(deviation) < _EXACT
    return 0.0 if exact else float(np.linalg.norm(deviation, ord=2))


def _circulant_deviation(shifts: Sequence[Shifts], num_workers: int) -> float:
    """Circulant matrices share the Fourier basis: eigenvalues multiply; index 0 is the mean's."""
    moduli = np.abs(_circulant_eigenvalues(shifts, num_workers))[:, 1:]
    moduli[moduli < 1e-12] = 0.0  # rounding error of an eigenvalue that is zero
    return float(moduli.prod(axis=0).max())


def _circulant_eigenvalues(
    shifts: Sequence[Shifts], num_workers: int
) -> npt.NDArray[np.complex128]:
    """Return the eigenvalues of each round, that of the mean first, one of conjugate pairs."""
    rows = np.zeros((len(shifts), num_workers))
    for row, (distances, weights) in zip(rows, shifts, strict=True):
        row[distances] = weights
    return np.fft.rfft(rows, axis=1)


def _lanczos(factors: Sequence[Sparse]) -> float:
    """Return ‖P − J‖₂ for a large sparse product P of factors, first to last."""
    # Slow to import, and needed on more than a thousand workers only.
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    num_workers = factors[0].shape[0]

    def squared(x: FloatArray) -> FloatArray:
        x = x.ravel() - x.mean()
        for factor in factors:
            x = cast(FloatArray, factor @ x)
        for factor in reversed(factors):
            x = cast(FloatArray, factor.T @ x)
        return x

    start = _random_starts(num_workers, 1).ravel()
    if np.linalg.norm(squared(start)) < _EXACT**2 * np.linalg.norm(start):
        return 0.0
    operator = LinearOperator((num_workers, num_workers), matvec=squared, dtype=np.float64)
    try:
        largest = eigsh(operator, k=1, v0=start, maxiter=100, return_eigenvectors=False)[0]
    except ArpackNoConvergence:
        # A long thin graph: eigenvalues cluster below 1, and few links cross any cut. Shift-invert
        # near 1 separates them, and factors cheaply on such a graph. 1 itself is the mean's.
        product = reduce(lambda state, factor: factor @ state, factors)
        gram = (product.T @ product).tocsc()
        largest = eigsh(gram, k=2, sigma=1 + 1e-6, v0=start, return_eigenvectors=False).min()
    return float(np.sqrt(max(largest, 0.0)))
