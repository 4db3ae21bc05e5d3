"""The methods that are compared: from a profile and a number of workers to what the model runs.

A new method is one function and one row of METHODS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np

from gossamer.algorithms import parse_algorithm
from gossamer.runtime_model import costs
from gossamer.runtime_model.costs import Links
from gossamer.runtime_model.model import (
    ITERATIONS,
    Compute,
    ExchangeTime,
    Order,
    TimedMethod,
    Trials,
    after_update,
    gamma,
    in_backward,
    resampled,
    whole_step,
)
from gossamer.runtime_model.profile import Profile
from gossamer.topology import Round, Schedule, parse, spaced
from gossamer.topology.arrays import FloatArray
from gossamer.wire import parse_wire

DDP = "ddp"
"""What all others are compared with."""

NUM_TRIALS = 24
_ITEM_BYTES = 4
"""Of a number, where a message is not the bucket itself."""

_MANY_WORKERS = 256
"""From here on there are fewer trials, so that a prediction rests on as many samples."""


class Job(NamedTuple):
    """A profile at some scale."""

    profile: Profile
    links: Links
    algorithm: str = "awc"
    """Of gossip."""

    every: int = 1
    """Steps from one exchange of gossip to the next."""

    wire: str = "fp32"
    """What of parameters travels in messages of gossip."""

    fragments: int = 1
    """Of the parameters, of which each exchange of gossip is one in turn."""

    @classmethod
    def of(cls, profile: Profile, num_workers: int, algorithm: str = "awc", every: int = 1) -> Job:
        """Return a profile's job on this many workers, with the batch per worker unchanged."""
        return cls(profile, Links.of(profile.network, num_workers), algorithm, every)

    @property
    def message_bytes(self) -> list[float]:
        """What a worker sends of each bucket in one message, on average over fragments."""
        wire = parse_wire(self.wire)
        sizes = [wire.num_bytes(num // _ITEM_BYTES, _ITEM_BYTES) for num in self.bucket_bytes]
        return [size / self.fragments for size in sizes]

    def coding_s(self, round: Round) -> FloatArray:
        """Return how long each worker writes a message, and reads that of every neighbour, [W].

        Beside what it computes. What is reduced is neither written nor read.
        """
        wire, pass_s = parse_wire(self.wire), self.profile.mix_s / self.fragments
        writes_W = wire.write_passes * (round.in_degrees > 0)
        reads_W = wire.read_passes * round.in_degrees
        return np.where(round.reduces, 0.0, pass_s * (writes_W + reads_W))

    @property
    def bucket_bytes(self) -> list[int]:
        """Sizes of the buckets."""
        return [bucket.num_bytes for bucket in self.profile.buckets]

    def compute(self, passes: float, hooks_s: float = 0.0) -> Compute:
        """Return what a worker computes.

        Args:
            passes: how often per iteration the method goes over all parameters.
            hooks_s: what its own code takes.
        """
        profile = self.profile
        shares = [bucket.num_bytes / profile.num_bytes for bucket in profile.buckets]
        return Compute(
            forward_s=profile.forward_s + profile.other_s,
            backward_s=tuple(bucket.backward_s for bucket in profile.buckets),
            update_s=tuple(
                bucket.update_s + (passes * profile.mix_s + hooks_s) * share
                for bucket, share in zip(profile.buckets, shares, strict=True)
            ),
        )

    def trials(self, num_trials: int = NUM_TRIALS, seed: int = 0) -> Trials:
        """Return how the compute times of this job vary."""
        profile = self.profile
        draw = resampled(profile.factors) if profile.factors else gamma(profile.variance)
        varies = bool(profile.factors) or profile.variance > 0
        # Many workers are many samples by themselves.
        enough = math.ceil(num_trials * min(1.0, _MANY_WORKERS / self.links.num_workers))
        return Trials(draw=draw, num_trials=enough if varies else 1, seed=seed)


Build: TypeAlias = Callable[[Job], TimedMethod]


def local(job: Job) -> TimedMethod:
    """Every worker for itself."""
    none = costs.nothing(job.links.num_workers, len(job.bucket_bytes))
    return TimedMethod(after_update, job.compute(0), job.links.num_workers, lambda step: none)


def ddp(job: Job) -> TimedMethod:
    """All-reduce of gradients, bucket by bucket, during the backward pass."""
    exchange = costs.all_reduce(job.links, job.bucket_bytes)
    # Gradients are copied into buckets and back.
    compute = job.compute(2, job.profile.hooks.ddp_s)
    return TimedMethod(in_backward, compute, job.links.num_workers, lambda step: exchange)


def post_local_sgd(job: Job, *, period: int) -> TimedMethod:
    """Local steps, and an all-reduce of the parameters after every few."""
    reduce = costs.all_reduce(job.links, job.bucket_bytes)
    none = costs.nothing(job.links.num_workers, len(job.bucket_bytes))
    return TimedMethod(
        after_update,
        job.compute(2 / period),
        job.links.num_workers,
        lambda step: none if step % period else reduce,
        period,
    )


def gossip(
    job: Job,
    *,
    schedule: Schedule,
    every: int = 1,
    order: Order = whole_step,
    num_steps: int = ITERATIONS,
    repeats: float = 1,
    gathered_bytes: int = 0,
) -> TimedMethod:
    """Mixing of parameters on a schedule of rounds.

    Args:
        job: what is trained.
        schedule: the rounds.
        every: steps from one of them to the next.
        order: of an iteration.
        num_steps: of training, over which the rounds of the model are spread where they do not
            repeat, as Ada's; by default the first ones.
        repeats: how often each round is done.
        gathered_bytes: what every worker tells all others before each exchange, as to a controller.
    """
    parse_wire(job.wire).check(parse_algorithm(job.algorithm), schedule)
    num_fragments, num_buckets = job.fragments, len(job.bucket_bytes)
    reduced_bytes = [round(num / num_fragments) for num in job.bucket_bytes]
    stride = max(1, num_steps // ITERATIONS)
    cycle = repeating(schedule, every, most=max(1, ITERATIONS // every), stride=stride)
    period = cycle.period or 1

    @cache
    def of_round(index: int) -> ExchangeTime:
        of_step = cycle.round(index)
        mixed = costs.mix(job.links, of_step, reduced_bytes, job.message_bytes)
        coding_WK = np.outer(job.coding_s(of_step), np.full(num_buckets, 1 / num_buckets))
        cost_WK = repeats * (mixed.cost_WK + coding_WK)
        if not gathered_bytes:
            return ExchangeTime(mixed.meet, cost_WK)
        cost_WK[:, 0] += costs.all_gather_s(job.links, gathered_bytes)
        return ExchangeTime(costs.everyone, cost_WK)

    def exchange(step: int) -> ExchangeTime:
        return of_round(step % period)

    passes = [_passes(cycle.round(index)) for index in range(period)]
    passed = repeats * float(np.mean(passes)) / num_fragments
    compute = job.compute(passed, job.profile.hooks.gossip_s)
    return TimedMethod(order, compute, job.links.num_workers, exchange, period)


def repeating(
    schedule: Schedule, every: int, *, most: int, first: int = 0, stride: int = 1
) -> Schedule:
    """Return a cycle of a schedule's rounds with the local steps between them.

    Where rounds do not repeat, some of them stand for all. They are chosen among exchanges: of
    steps, one in so many might always be a local one.

    Args:
        schedule: the rounds.
        every: steps from one of them to the next.
        most: how many rounds are chosen where they do not repeat.
        first: the step from which on.
        stride: exchanges from one that is chosen to the next.
    """
    if schedule.period is not None:
        return spaced(schedule, every)

    def build(index: int) -> Round:
        exchange = first // every + index * stride
        by_step = schedule.counts == "steps"
        return schedule.round(every * exchange + every - 1 if by_step else exchange)

    return spaced(Schedule(schedule.num_workers, most, build, schedule.name), every)


def _passes(round: Round) -> float:
    """Return how often a round goes over a worker's parameters, on average over workers.

    A message is mixed in one pass; an all-reduce is copied to and from.
    """
    return float(np.where(round.reduces, 2.0, round.in_degrees).mean())


def order_of(algorithm: str) -> Order:
    """Return when an iteration of an algorithm exchanges."""
    return whole_step if parse_algorithm(algorithm).overlaps else after_update


LOCAL_STEPS = 4
"""Of PostLocalSGD, from one all-reduce to the next."""

METHODS: dict[str, Build] = {
    DDP: ddp,
    f"post_local_sgd(h={LOCAL_STEPS})": partial(post_local_sgd, period=LOCAL_STEPS),
}
"""Methods that are no gossip; a topology's text names those that are."""

TOPOLOGIES = ("complete", "ring", "one_peer_ring", "one_peer_exponential", "aer")
"""Those that a plan looks at."""


def schedule_of(topology: str, job: Job) -> Schedule:
    """Return the schedule that a text names, with the job's nodes."""
    return parse(
        topology, job.links.num_workers, workers_per_node=job.profile.network.workers_per_node
    )


def build(name: str, job: Job) -> TimedMethod:
    """Return the method of a name: a row of METHODS, or a topology that gossip uses."""
    if name in METHODS:
        return METHODS[name](job)
    algorithm = parse_algorithm(job.algorithm)
    return gossip(
        job,
        schedule=algorithm.adapt(schedule_of(name, job), fragments=job.fragments),
        every=job.every,
        order=order_of(job.algorithm),
        repeats=algorithm.num_exchanges,
    )
