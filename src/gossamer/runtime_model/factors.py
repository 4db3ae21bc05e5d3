"""Where a saving comes from: overlap, links, or tolerance to varying compute times.

Three changes lead from DDP to overlapped gossip. Each can be made separately in the model:

    overlap     exchanges overlap with the next iteration, not only with the backward pass
    links       an exchange costs what the round's messages cost, not a global all-reduce
    tolerance   a worker waits for its peers only, not for all workers

A factor's part is its effect on the iteration time, averaged over all orders of making the three
changes (the Shapley value), so the three add up to the saving.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import final

from gossamer.runtime_model.costs import everyone
from gossamer.runtime_model.methods import Job, ddp
from gossamer.runtime_model.model import ExchangeTime, TimedMethod, Trials, predict

_SWITCHES: tuple[str, ...] = ("overlap", "links", "tolerance")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Seconds per iteration that each factor saves; negative where it costs."""

    ddp_s: float
    method_s: float
    overlap_s: float
    links_s: float
    tolerance_s: float


def split_saving(job: Job, method: TimedMethod, trials: Trials | None = None) -> Split:
    """Return where the saving of a method over DDP comes from."""
    sampled = trials or job.trials()
    reference = ddp(job)

    def seconds(thrown: frozenset[str]) -> float:
        own = method if "overlap" in thrown else reference

        def exchange(step: int) -> ExchangeTime:
            costs = method.exchange(step) if "links" in thrown else reference.exchange(step)
            meet = method.exchange(step).meet if "tolerance" in thrown else everyone
            return ExchangeTime(meet, costs.cost_WK)

        timed = TimedMethod(own.order, own.compute, own.num_workers, exchange, own.period)
        return predict(timed, sampled).mean_s

    time_of = {
        thrown: seconds(thrown)
        for size in range(4)
        for thrown in map(frozenset, itertools.combinations(_SWITCHES, size))
    }
    shares = {switch: _shapley(switch, time_of) for switch in _SWITCHES}
    return Split(
        ddp_s=time_of[frozenset()],
        method_s=time_of[frozenset(_SWITCHES)],
        overlap_s=shares["overlap"],
        links_s=shares["links"],
        tolerance_s=shares["tolerance"],
    )


def _shapley(switch: str, time_of: dict[frozenset[str], float]) -> float:
    orders = list(itertools.permutations(_SWITCHES))
    gains: list[float] = []
    for order in orders:
        before = frozenset(order[: order.index(switch)])
        gains.append(time_of[before] - time_of[before | {switch}])
    return math.fsum(gains) / len(orders)
