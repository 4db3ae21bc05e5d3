"""How long an iteration takes: the recursion over workers, buckets and iterations.

Every worker computes F (forward), B (backward, bucket by bucket) and U (update), and C is the
exchange of a bucket. An order gives the dependencies between them; an exchange, which workers wait
for each other and for how long. Times of all trials and workers are advanced together, as arrays.

Reference: Wang et al., From promise to practice (https://arxiv.org/abs/2410.11998).
"""

# R: trials, W: workers, K: buckets

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, final

import numpy as np

from gossamer.errors import UserError
from gossamer.topology.arrays import FloatArray

Task: TypeAlias = Literal["F", "B", "C", "U"]

Meet: TypeAlias = Callable[[FloatArray], FloatArray]
"""From ready times [R, W] to the latest of each worker and those whom it exchanges with."""

DrawFactors: TypeAlias = Callable[[np.random.Generator, tuple[int, int]], FloatArray]
"""Normalized compute times [R, W] of one iteration: positive, mean 1."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Compute times of one worker in an iteration, at factor 1."""

    forward_s: float
    backward_s: tuple[float, ...]
    """Of each bucket, in the order of the backward pass."""

    update_s: tuple[float, ...]
    """Of each bucket, mixing included; does not vary."""

    @property
    def total_s(self) -> float:
        """Return the time of an iteration without communication."""
        return self.forward_s + sum(self.backward_s) + sum(self.update_s)


@final
@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """Which workers wait for each other in one iteration's exchange, and how long it takes."""

    meet: Meet
    cost_WK: FloatArray
    """Duration of each worker's part of each bucket, once all whom it waits for are ready."""


class Span(NamedTuple):
    """One task of all workers, [R, W] each."""

    task: Task
    bucket: int
    start: FloatArray
    end: FloatArray


class Clocks(NamedTuple):
    """The time that each worker has reached, between two iterations."""

    free: FloatArray
    """When each worker can begin the next forward pass, [R, W]."""

    landed: list[FloatArray]
    """When each bucket's last exchange ends, [R, W] each."""


Order: TypeAlias = Callable[[Clocks, Compute, FloatArray, ExchangeTime, list[Span]], Clocks]
"""Take one iteration: from the clocks, compute, factors [R, W] and exchange; append its spans."""


@final
@dataclass(frozen=True, slots=True)
class TimedMethod:
    """A method as the model runs it: an order, and the exchange of each iteration."""

    order: Order
    compute: Compute
    num_workers: int
    exchange: Callable[[int], ExchangeTime]
    period: int = 1
    """Iterations after which exchanges repeat."""


def bucket_wise(
    clocks: Clocks, compute: Compute, factor: FloatArray, exchange: ExchangeTime, spans: list[Span]
) -> Clocks:
    """Overlapped, as in the paper: each bucket is mixed and updated within the backward pass.

    U_k starts at max(end of B_k, end of the bucket's last C); C_k when all that exchange have ended
    U_k and their previous C.
    """
    now = _run(spans, "F", 0, clocks.free, compute.forward_s * factor)
    wire, landed = clocks.landed[-1], list[FloatArray]()
    for k, (backward_s, update_s) in enumerate(
        zip(compute.backward_s, compute.update_s, strict=True)
    ):
        now = _run(spans, "B", k, now, backward_s * factor)
        now = _run(spans, "U", k, np.maximum(now, clocks.landed[k]), update_s)
        start = exchange.meet(np.maximum(now, wire))
        wire = _run(spans, "C", k, start, exchange.cost_WK[:, k])
        landed.append(wire)
    return Clocks(now, landed)


def whole_step(
    clocks: Clocks, compute: Compute, factor: FloatArray, exchange: ExchangeTime, spans: list[Span]
) -> Clocks:
    """Overlapped, as ``decentralize`` does it: finish all buckets, update, start all buckets.

    U starts at max(end of the last B, end of the last step's C); C_k when all that exchange have
    ended U and C_(k−1). A worker starts no exchange before its last one has completed, sends
    included.
    """
    now = _forward_backward(clocks.free, compute, factor, spans)
    now = np.maximum(now, clocks.landed[-1])  # buckets complete in order
    now = _update(now, compute, spans)
    return Clocks(now, _exchange(now, exchange, spans))


def after_update(
    clocks: Clocks, compute: Compute, factor: FloatArray, exchange: ExchangeTime, spans: list[Span]
) -> Clocks:
    """Not overlapped (adapt then combine, local steps): the exchange follows the update."""
    now = _forward_backward(clocks.free, compute, factor, spans)
    landed = _exchange(_update(now, compute, spans), exchange, spans)
    return Clocks(landed[-1], landed)


def in_backward(
    clocks: Clocks, compute: Compute, factor: FloatArray, exchange: ExchangeTime, spans: list[Span]
) -> Clocks:
    """As DDP: each bucket is all-reduced when its gradients are ready; the update waits for all.

    C_k starts when all that exchange have ended B_k and C_(k−1); U at the end of the last C.
    """
    now = _run(spans, "F", 0, clocks.free, compute.forward_s * factor)
    wire, landed = clocks.free, list[FloatArray]()
    for k, backward_s in enumerate(compute.backward_s):
        now = _run(spans, "B", k, now, backward_s * factor)
        wire = _run(spans, "C", k, exchange.meet(np.maximum(now, wire)), exchange.cost_WK[:, k])
        landed.append(wire)
    return Clocks(_update(np.maximum(now, wire), compute, spans), landed)


def gamma(variance: float) -> DrawFactors:
    """Compute times from a gamma distribution: positive, with mean 1 and this variance."""
    if variance < 0:
        raise UserError(f"a variance must not be negative, got {variance}; use 0 for none")
    if variance < 1e-12:  # 1 / variance could overflow
        return lambda rng, shape: np.ones(shape)
    return lambda rng, shape: rng.gamma(1 / variance, variance, shape)


def resampled(factors: Sequence[float]) -> DrawFactors:
    """Compute times drawn from measured ones, with replacement."""
    measured = np.asarray(factors) / np.mean(factors)
    return lambda rng, shape: rng.choice(measured, shape)


_EVEN = gamma(0.0)

ITERATIONS = 96
"""Iterations that a prediction averages, rounded up to complete cycles of the schedule."""

LONGEST_PERIOD = 1024
"""Longer cycles are not completed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """How a prediction is sampled: random factors, and how many of them."""

    draw: DrawFactors = _EVEN
    num_trials: int = 1
    iterations: int = ITERATIONS

    warmup: int = 32
    """Warm-up iterations, in which delays propagate from worker to worker."""

    seed: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Iteration times over trials, workers and iterations."""

    mean_s: float
    p05_s: float
    p50_s: float
    p95_s: float
    exposed_s: float
    """Mean idle time per iteration: a worker waits for its exchange, or for other workers."""


def predict(method: TimedMethod, trials: Trials = Trials()) -> Prediction:  # noqa: B008 - frozen
    """Return how long iterations take."""
    if method.period <= LONGEST_PERIOD:
        cycles = -(-trials.iterations // method.period)
        trials = replace(trials, iterations=cycles * method.period)
    durations, exposed = list[FloatArray](), list[FloatArray]()
    before = np.zeros((trials.num_trials, method.num_workers))
    for step, (clocks, factor, _) in enumerate(_iterate(method, trials)):
        if step >= trials.warmup:
            durations.append(clocks.free - before)
            exposed.append(durations[-1] - _busy(method.compute, factor))
        before = clocks.free
    p05, p50, p95 = np.percentile(durations, [5, 50, 95]).tolist()
    return Prediction(
        mean_s=float(np.mean(durations)),
        p05_s=p05,
        p50_s=p50,
        p95_s=p95,
        exposed_s=float(np.mean(exposed)),
    )


class Event(NamedTuple):
    """One task of one worker."""

    worker: int
    iteration: int
    task: Task
    bucket: int
    start_s: float
    end_s: float


def timeline(
    method: TimedMethod, iterations: int = 3, *, draw: DrawFactors = _EVEN, seed: int = 0
) -> list[Event]:
    """Return every task of every worker in the first iterations of one trial."""
    trials = Trials(draw=draw, iterations=iterations, warmup=0, seed=seed)
    return [
        Event(worker, step, span.task, span.bucket, float(start), float(end))
        for step, (_, _, spans) in enumerate(_iterate(method, trials))
        for span in spans
        for worker, (start, end) in enumerate(zip(span.start[0], span.end[0], strict=True))
        if end > start
    ]


def _iterate(
    method: TimedMethod, trials: Trials
) -> Iterator[tuple[Clocks, FloatArray, list[Span]]]:
    rng = np.random.default_rng(trials.seed)
    shape = trials.num_trials, method.num_workers
    clocks = Clocks(np.zeros(shape), [np.zeros(shape)] * len(method.compute.backward_s))
    for step in range(trials.warmup + trials.iterations):
        factor, spans = trials.draw(rng, shape), list[Span]()
        clocks = method.order(clocks, method.compute, factor, method.exchange(step), spans)
        yield clocks, factor, spans


def _busy(compute: Compute, factor: FloatArray) -> FloatArray:
    varying = compute.forward_s + sum(compute.backward_s)
    return varying * factor + sum(compute.update_s)


def _forward_backward(
    start: FloatArray, compute: Compute, factor: FloatArray, spans: list[Span]
) -> FloatArray:
    now = _run(spans, "F", 0, start, compute.forward_s * factor)
    for k, backward_s in enumerate(compute.backward_s):
        now = _run(spans, "B", k, now, backward_s * factor)
    return now


def _update(start: FloatArray, compute: Compute, spans: list[Span]) -> FloatArray:
    now = start
    for k, update_s in enumerate(compute.update_s):
        now = _run(spans, "U", k, now, update_s)
    return now


def _exchange(start: FloatArray, exchange: ExchangeTime, spans: list[Span]) -> list[FloatArray]:
    """Exchange all buckets, one after the other; return when each has arrived."""
    now, landed = start, list[FloatArray]()
    for k, cost_W in enumerate(exchange.cost_WK.T):
        now = _run(spans, "C", k, exchange.meet(now), cost_W)
        landed.append(now)
    return landed


def _run(
    spans: list[Span], task: Task, bucket: int, start: FloatArray, seconds: FloatArray | float
) -> FloatArray:
    end = start + seconds
    spans.append(Span(task, bucket, start, end))
    return end
