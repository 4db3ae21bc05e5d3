"""Members divide the samples: each is drawn once per pass, and a lost worker misses few."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice

import pytest

import gossamer
from gossamer.errors import UserError


@dataclass
class Member:
    """One worker's view of the members."""

    rank: int
    num_workers: int
    num_steps: int = 0


def samplers(num_workers: int, num_samples: int, batch_size: int) -> list[gossamer.MemberSampler]:
    return [
        gossamer.MemberSampler(Member(rank, num_workers), num_samples, batch_size)
        for rank in range(num_workers)
    ]


@pytest.mark.parametrize(("num_workers", "batch_size"), [(1, 5), (3, 7), (4, 8), (5, 12)])
def test_each_sample_is_drawn_once_per_pass(num_workers: int, batch_size: int) -> None:
    """Over all workers, whether or not the sizes divide; the next pass has another order."""
    num_samples, passes = 60, 7
    num_steps = num_samples * passes // batch_size
    shares = [islice(sampler, num_steps) for sampler in samplers(num_workers, 60, batch_size)]
    # The order of a step: one sample of each worker's batch in turn.
    order = [
        batch[k]
        for step in zip(*shares, strict=True)
        for k in range(max(map(len, step)))
        for batch in step
        if k < len(batch)
    ]
    assert len(order) == num_steps * batch_size
    for start in range(0, len(order) - num_samples + 1, num_samples):
        assert sorted(order[start : start + num_samples]) == [*range(num_samples)]
    assert order[:num_samples] != order[num_samples : 2 * num_samples]


def test_no_seed_s_order_is_another_s_later() -> None:
    """The second pass with one seed is not the first pass with the next seed."""
    first, second = (gossamer.MemberSampler(Member(0, 1), 60, 60, seed=seed) for seed in (0, 1))
    orders = [each.batch(step) for each in (first, second) for step in range(3)]
    assert len({*map(tuple, orders)}) == len(orders)


@pytest.mark.parametrize("late", [0, 2])
def test_a_lost_worker_affects_only_the_steps_in_progress(late: int) -> None:
    """One batch is missed if all are in one step; no other step is affected if some are behind."""
    num_samples, batch_size, died_at = 1000, 40, 10
    members = [Member(rank, 4) for rank in range(4)]
    shared = [gossamer.MemberSampler(member, num_samples, batch_size) for member in members]
    missed: dict[int, int] = {}
    everything = gossamer.MemberSampler(Member(0, 1), num_samples, batch_size)
    for step in range(num_samples // batch_size):
        seen: Counter[int] = Counter()
        for rank, (member, sampler) in enumerate(zip(members, shared, strict=True)):
            # The last two continue with three members when they detect it.
            if rank != 1 and step > died_at + (late if rank > 1 else 0):
                member.rank, member.num_workers = rank - (rank > 1), 3
            if rank != 1 or step < died_at:
                seen.update(sampler.batch(step))
        if seen != Counter(everything.batch(step)):
            missed[step] = batch_size - len(seen)
    assert [*missed] == [*range(died_at, died_at + late + 1)]
    assert missed[died_at] == batch_size // 4
    assert sum(missed.values()) <= (late + 1) * batch_size / 2


def test_a_worker_that_joins_continues_at_the_step_of_the_others() -> None:
    """The step is the only state."""
    one, other = samplers(2, 100, 10)
    late = gossamer.MemberSampler(Member(1, 2, num_steps=7), 100, 10)
    assert next(iter(late)) == other.batch(7)
    assert not {*one.batch(7)} & {*other.batch(7)}


def test_a_batch_is_for_all_workers() -> None:
    """A batch with less than one sample per worker is rejected."""
    with pytest.raises(UserError, match="got 10 samples and batch_size=3 for 4 workers"):
        gossamer.MemberSampler(Member(0, 4), 10, 3)
