from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from gossamer.errors import UserError
from gossamer.topology import (
    Round,
    complete,
    cycle,
    exponential,
    from_matrix,
    metropolis,
    ring,
    star,
    uniform,
)
from gossamer.topology.weights import group_average

DIRECTED = [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]


def test_neighbours_are_the_rows_and_columns_of_the_matrix() -> None:
    """What a worker receives is its row of W, and what it sends its column, without itself."""
    part = from_matrix(DIRECTED).neighbours(0)
    assert part.self_weight == 0.5
    assert part.receives.workers.tolist() == [1]
    assert part.sends.workers.tolist() == [2]
    assert part.receives.weights.tolist() == part.sends.weights.tolist() == [0.5]


def test_shifts_are_a_row_that_all_share() -> None:
    """From 0 on, whichever way the graph points; other graphs have none."""
    for round in (ring(5), complete(4), exponential(8), from_matrix(DIRECTED), ring(1)):
        assert round.shifts is not None
        row = np.zeros(round.num_workers)
        row[round.shifts.distances] = round.shifts.weights
        rows = [np.roll(row, worker) for worker in range(round.num_workers)]
        assert round.matrix().toarray().tolist() == np.array(rows).tolist()
        assert round.shifts.distances.tolist() == sorted(round.shifts.distances.tolist())
    swapped = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]  # as many in each row
    unequal = [[0.5, 0.5], [0.5, 0.5 + 1e-15]]
    for round in (star(5), from_matrix(swapped), from_matrix(unequal)):
        assert round.shifts is None


@pytest.mark.parametrize("worker", [-1, 3])
def test_a_worker_outside_the_round_is_refused(worker: int) -> None:
    """Negative numbers do not count from the end: a rank is a rank."""
    with pytest.raises(UserError, match=r"0\.\.2, got"):
        from_matrix(DIRECTED).neighbours(worker)


def test_a_round_is_a_value() -> None:
    """Equal weights make equal rounds with equal hashes, however they were built."""
    assert ring(3) == complete(3) == from_matrix(np.full((3, 3), 1 / 3))
    assert ring(5) == ring(5, weights=metropolis)  # whose diagonal is 1 − 1/3 − 1/3
    assert len({ring(5), ring(5), ring(6), exponential(5)}) == 3
    assert ring(5) != "ring"


def test_a_round_cannot_be_changed() -> None:
    """Neither the matrix that is handed out nor the one that was handed in changes the round."""
    given = csr_array(np.array(DIRECTED))
    round = Round(given)
    given.data[0] = 7.0
    assert round.matrix().toarray().tolist() == DIRECTED
    for one in (round, complete(3)):
        arrays = (one.in_degrees, one.out_degrees, one.copies_sent, one.messages_sent)
        for array in (one.matrix().data, *arrays):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 7
    handed_out = round.matrix()
    handed_out.data = handed_out.data * 7
    assert round.neighbours(0).self_weight == 0.5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_copy_is_an_equal_round_that_cannot_be_changed_either(copied: Any) -> None:
    """Rounds travel to other processes by pickle, also those that move the mean."""
    for round in (ring(5), star(5, weights=uniform)):
        other = copied(round)
        assert other == round
        assert not other.matrix().data.flags.writeable


def test_the_digest_is_the_same_in_another_process() -> None:
    """Ranks compare rounds by digest, so it must not depend on a process's hash seed."""
    code = "from gossamer.topology import ring; print(ring(12).digest)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == ring(12).digest


def test_stored_zeros_and_duplicates_do_not_make_another_round() -> None:
    """A round is its weights, not the way a sparse matrix happens to store them."""
    rows, columns = [0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 1]
    messy = csr_array(([0.5, 0.25, 0.25, 0.5, 0.5, 0.0], (rows, columns)))
    assert from_matrix(messy) == complete(2)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 0, 0], [[0, 1, 2]]),
        ([5, 1, 5, 1], [[0, 2], [1, 3]]),
        ([2, 0, 1], [[0], [1], [2]]),
        ([0, 1, 0, 2, 0], [[0, 2, 4], [1], [3]]),
    ],
)
def test_groups_are_read_back_from_the_weights(
    labels: list[int], expected: list[list[int]]
) -> None:
    """A round built as a partition tells its cliques, in the order of their first members."""
    groups = group_average(np.array(labels)).groups()
    assert groups is not None
    assert [group.tolist() for group in groups] == expected


@pytest.mark.parametrize(
    "matrix",
    [
        DIRECTED,
        ring(5).matrix(),
        [[0.75, 0.25], [0.25, 0.75]],  # a clique, but not a uniform one
        # rows 0 and 1 share their first member without having the same members
        [[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0.5]],
    ],
)
def test_other_rounds_have_no_groups(matrix: object) -> None:
    """Anything but uniform averaging within a partition must not run as all-reduces."""
    assert from_matrix(matrix).groups() is None  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("round", "messages", "copies"),
    [
        (complete(8), [14] * 8, [1.75] * 8),
        (complete(2), [1, 1], [1, 1]),
        (complete(1), [0], [0]),
        (ring(5), [2] * 5, [2] * 5),
        (star(4), [3, 1, 1, 1], [3, 1, 1, 1]),
        (group_average(np.array([0, 0, 0, 1, 1, 2])), [4, 4, 4, 1, 1, 0], [4 / 3] * 3 + [1, 1, 0]),
    ],
)
def test_what_a_round_sends(round: Round, messages: list[int], copies: list[float]) -> None:
    """One message and copy per receiver; a group of g all-reduces: 2(g − 1) messages, /g copies."""
    assert round.messages_sent.tolist() == messages
    np.testing.assert_allclose(round.copies_sent, copies)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ([[0.5, 0.5]], "square"),
        (np.zeros((0, 0)), "at least one worker"),
        ([[1.5, -0.5], [-0.5, 1.5]], "non-negative"),
        ([[np.nan, 1.0], [1.0, 0.0]], "non-negative"),
        ([[0.5, 0.4], [0.5, 0.5]], r"row of a mixing matrix must sum to 1, got 0\.9 in row 0"),
        ([[0.5, 0.5], [0.25, 0.75]], "column of a mixing matrix must sum to 1, got .*metropolis"),
        ("abc", "array of real numbers .* got str"),
        ([[1.0], [0.5, 0.5]], "rows of equal length, got list"),
        ([["a"]], "array of real numbers"),
        (None, "array of real numbers .* got NoneType"),
        ([[1 + 5j]], "array of real numbers"),
    ],
)
def test_what_is_not_a_mixing_matrix_is_refused(matrix: object, words: str) -> None:
    """The error says what was required, what was given, and what to do."""
    with pytest.raises(UserError, match=words):
        from_matrix(matrix)  # pyright: ignore[reportArgumentType]


def test_a_round_may_declare_that_it_moves_the_mean() -> None:
    """Rows alone must sum to one where the caller says so, and the round knows it."""
    round = from_matrix([[0.5, 0.5], [0.25, 0.75]], doubly_stochastic=False)
    assert not round.conserves_mean
    assert not round.symmetric


def test_a_cycle_needs_rounds_of_one_size() -> None:
    """Rounds on different numbers of workers, or none at all, are refused when it is built."""
    for rounds in ([], [ring(4), ring(5)]):
        with pytest.raises(UserError, match="same number of workers"):
            cycle(rounds)
