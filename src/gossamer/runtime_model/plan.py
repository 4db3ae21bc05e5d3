"""From a profile to a table of methods and scales, and to advice with its reason."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from gossamer.algorithms import parse_algorithm
from gossamer.errors import UserError, quoted
from gossamer.runtime_model.factors import Split, split_saving
from gossamer.runtime_model.losses import (
    MEASURED_TOPOLOGY,
    REFERENCE,
    LossGap,
    MeasuredLoss,
    comparable,
    nearest_gap,
    packaged_losses,
)
from gossamer.runtime_model.methods import (
    DDP,
    LOCAL_STEPS,
    METHODS,
    TOPOLOGIES,
    Job,
    build,
    schedule_of,
)
from gossamer.runtime_model.model import Prediction, predict
from gossamer.runtime_model.profile import Profile
from gossamer.topology.cost import ring_copies
from gossamer.topology.summary import summarize
from gossamer.wire import parse_wire

WORTH_IT = 0.03
"""Share of an iteration that gossip must save: less is not worth giving up the exact average."""

AS_FAST = 0.05
"""Graphs whose times differ by less are chosen by how well they mix."""

LEVEL = 0.1
"""Methods whose times differ by less are level: so far off are predictions, where the model has
been held against measurements."""


ADVISED_WIRES = ("fp32", "bf16", "modulo(bits=8)", "modulo(bits=4)")
"""Formats that advice may name, from the most bits to the fewest."""

MAX_SCALES = 32
MAX_WORKERS = 2**14
MAX_WORK = 2**19
"""Workers times buckets: about two minutes per scale."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method at one scale."""

    method: str
    workers: int
    prediction: Prediction
    speedup: float
    """DDP's iteration time over this one's."""

    bytes_per_step: float
    """What the busiest worker sends, on average over iterations."""

    mixing: float | None
    """p: 1 is an exact average at every step; None where workers are not brought together by
    rounds."""

    rounds_to_consensus: int | None
    """Iterations to an exact average; None where it is only approached."""

    loss: LossGap | None = None
    """What it loses to DDP, as measured for this kind of model; None where nothing was."""

    equal_loss_s: float | None = None
    """Time to what DDP learns in an iteration: the mean, times as many iterations as it takes;
    None where that is not known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to use at one scale."""

    workers: int
    method: str
    reason: str
    ranked_by: Literal["equal loss", "step"]
    """Whether methods are compared by ``Row.equal_loss_s``, which takes that of all of them, or by
    the time of an iteration."""

    saving: float
    """Share of DDP's time, by that which ranks."""

    wire: str
    """What should travel in the best gossip, taken or not: the format with the most bits that is
    about as fast as any. Graphs are compared with each one's own."""

    wire_s: float
    """The time of an iteration with that."""

    split: Split
    """Where the saving of the fastest gossip comes from, taken or not; per iteration."""

    level: tuple[str, ...]
    """Other methods that are as good, for all that the model can tell: from another profile of the
    same job one of them may be advised."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A profile's methods at several scales."""

    profile: Profile
    strong: bool
    """Whether the batch of all workers together stays the profile's, at every scale."""

    algorithm: str
    """Of gossip."""

    every: int
    """Steps from one exchange of gossip to the next."""

    wire: str
    """What of parameters travels in gossip; advice may name another."""

    fragments: int
    """Of the parameters, of which each exchange of gossip is one in turn."""

    rows: tuple[Row, ...]
    advice: tuple[Advice, ...]
    missing: dict[str, str]
    """Topologies that cannot be built at some scale, and why."""

    def job(self, workers: int) -> Job:
        """Return the job at one of the scales."""
        compute = _compute_factor(self.profile, workers, strong=self.strong)
        profile = self.profile.with_compute(compute)
        job = Job.of(profile, workers, self.algorithm, self.every)
        return job._replace(wire=self.wire, fragments=self.fragments)


def make_plan(  # noqa: PLR0913 - one keyword per option
    profile: Profile,
    workers: Sequence[int],
    *,
    topologies: Sequence[str] = TOPOLOGIES,
    strong: bool = False,
    algorithm: str = "awc",
    every: int = 1,
    wire: str = "fp32",
    fragments: int = 1,
    wires: Sequence[str] = ADVISED_WIRES,
    losses: Sequence[MeasuredLoss] | None = None,
) -> Plan:
    """Predict all methods at all scales, and advise.

    Args:
        profile: the job.
        workers: the scales, 2 or more workers each.
        topologies: those that gossip may use.
        strong: whether the batch of all workers together stays the profile's, so that compute
            shrinks as workers are added; by default the batch of each worker stays.
        algorithm: of gossip.
        every: steps from one exchange of gossip to the next.
        wire: what of parameters travels in gossip.
        fragments: of the parameters, of which each exchange of gossip is one in turn.
        wires: formats that advice may name besides ``wire``, from the most bits to the fewest.
        losses: what was measured; by default what comes with the package.
    """
    _check_scales(profile, workers)
    parse_algorithm(algorithm)  # a name that is none is refused once, not at every topology
    for each in (wire, *wires):
        parse_wire(each)
    losses = packaged_losses() if losses is None else losses
    losses = [row for row in losses if row.kind == profile.kind]
    rows: list[Row] = []
    advice: list[Advice] = []
    missing: dict[str, str] = {}
    for scale in dict.fromkeys(workers):
        compute = _compute_factor(profile, scale, strong=strong)
        job = Job.of(profile.with_compute(compute), scale, algorithm, every)
        job = job._replace(wire=wire, fragments=fragments)
        of_scale = _rows(job, topologies, missing, losses)
        if all(row.method in METHODS for row in of_scale):
            raise UserError(
                f"a plan needs a topology that exists on {scale} workers, got none: "
                f"{'; '.join(missing.values())}"
            )
        rows += of_scale
        advice.append(_advise(job, of_scale, wires, losses))
    return Plan(
        profile=profile,
        strong=strong,
        algorithm=algorithm,
        every=every,
        wire=wire,
        fragments=fragments,
        rows=tuple(rows),
        advice=tuple(advice),
        missing=missing,
    )


def _check_scales(profile: Profile, workers: Sequence[int]) -> None:
    """Refuse what would take hours before anything is computed."""
    if not 1 <= len(workers) <= MAX_SCALES or min(workers) < 2:
        raise UserError(
            f"a plan is for 1 to {MAX_SCALES} scales of 2 or more workers, got "
            f"{quoted(list(workers))}; write for example --workers 8,16,32"
        )
    largest, buckets = max(workers), len(profile.buckets)
    if largest > MAX_WORKERS or largest * buckets > MAX_WORK:
        most = min(MAX_WORKERS, MAX_WORK // buckets)
        raise UserError(
            f"a plan for {buckets} buckets is for up to {most:,} workers, got {quoted(largest)}; "
            "take a smaller scale, or larger buckets for the profile"
        )


def _compute_factor(profile: Profile, workers: int, *, strong: bool) -> float:
    return profile.workers / workers if strong else 1.0


def _rows(
    job: Job, topologies: Sequence[str], missing: dict[str, str], losses: Sequence[MeasuredLoss]
) -> list[Row]:
    predictions = {name: predict(build(name, job), job.trials()) for name in METHODS}
    for topology in topologies:
        try:
            predictions[topology] = predict(build(topology, job), job.trials())
        except UserError as error:
            missing[f"{topology} on {job.links.num_workers}"] = str(error)
    ddp_s = predictions[DDP].mean_s
    known = comparable(losses, job.algorithm, job.every)
    return [
        _row(job, name, found, ddp_s, _loss_of(job, name, known))
        for name, found in predictions.items()
    ]


def _loss_of(job: Job, name: str, known: Sequence[MeasuredLoss]) -> LossGap | None:
    if name in METHODS:
        return REFERENCE if name == DDP and known else None
    return nearest_gap(known, name, job.links.num_workers)


def _row(job: Job, name: str, prediction: Prediction, ddp_s: float, loss: LossGap | None) -> Row:
    workers, num_bytes = job.links.num_workers, job.profile.num_bytes
    if name in METHODS:
        exact = name == DDP
        sent = ring_copies(workers) * num_bytes / (1 if exact else LOCAL_STEPS)
        mixing, rounds = (1.0, 1) if exact else (None, None)
    else:
        algorithm = parse_algorithm(job.algorithm)
        schedule = algorithm.adapt(schedule_of(name, job))
        summary = summarize(schedule)
        # A wire format is for messages; what is reduced goes in full.
        reduces = schedule.round(0).reduces.any()
        whole = num_bytes / job.fragments if reduces else sum(job.message_bytes)
        sent = summary.copies_sent * whole * algorithm.num_exchanges / job.every
        mixing, rounds = summary.mixing_rate, summary.rounds_to_consensus
        rounds = rounds and rounds * job.every
    more_steps = loss and loss.more_steps
    return Row(
        method=name,
        workers=workers,
        prediction=prediction,
        speedup=ddp_s / prediction.mean_s,
        bytes_per_step=sent,
        mixing=mixing,
        rounds_to_consensus=rounds,
        loss=loss,
        equal_loss_s=more_steps and more_steps * prediction.mean_s,
    )


def _advise(
    job: Job, rows: Sequence[Row], wires: Sequence[str], losses: Sequence[MeasuredLoss]
) -> Advice:
    ddp = next(row for row in rows if row.method == DDP)
    gossiping = [row for row in rows if row.method not in METHODS]
    coded = {row.method: _best_wire(job, row, wires) for row in gossiping}
    per_step = {DDP: ddp.prediction.mean_s} | {name: each.step_s for name, each in coded.items()}
    more_steps = {row.method: row.loss and row.loss.more_steps for row in [ddp, *gossiping]}
    to_equal_loss = {name: per_step[name] * more for name, more in more_steps.items() if more}
    by_loss = to_equal_loss.keys() == per_step.keys()
    seconds = to_equal_loss if by_loss else per_step
    ddp_s, fastest_s = seconds[DDP], min(seconds[row.method] for row in gossiping)
    # What mixes best must not cost the saving itself.
    worth_it_s = max(fastest_s, ddp_s * (1 - WORTH_IT))
    limit_s = min(fastest_s * (1 + AS_FAST), worth_it_s)
    as_fast = [row for row in gossiping if seconds[row.method] <= limit_s]
    best = max(as_fast, key=lambda row: row.mixing or 0.0)
    wire, step_s = coded[best.method]
    chosen = job._replace(wire=wire)
    split = split_saving(chosen, build(best.method, chosen))
    saving = 1 - seconds[best.method] / ddp_s
    stay = saving < WORTH_IT
    to_loss = best.loss if by_loss else None
    reason = (
        _why_ddp(ddp, best.method, step_s, saving, to_loss)
        if stay
        else _why_gossip(seconds, best.method, step_s, as_fast, split, to_loss)
    )
    method = DDP if stay else best.method
    level = _level_with(method, seconds)
    return Advice(
        workers=ddp.workers,
        method=method,
        reason=reason
        + _why_wire(job, best, wire, step_s)
        + _why_level(level)
        + _why_ranked(to_loss, known=bool(losses)),
        wire=wire,
        wire_s=step_s,
        ranked_by="equal loss" if by_loss else "step",
        saving=0.0 if stay else saving,
        split=split,
        level=level,
    )


class _WireTime(NamedTuple):
    wire: str
    step_s: float


def _best_wire(job: Job, row: Row, wires: Sequence[str]) -> _WireTime:
    """Return the wire format with the most bits that is about as fast as any, and its time."""
    own = _WireTime(job.wire, row.prediction.mean_s)
    if row.prediction.exposed_s < AS_FAST * (own.step_s - row.prediction.exposed_s):
        return own  # no format can make more of a difference than what is waited for
    seconds = {own.wire: own.step_s}
    for wire in wires:
        if wire not in seconds:
            with contextlib.suppress(UserError):  # where it cannot travel
                timed = build(row.method, job._replace(wire=wire))
                seconds[wire] = predict(timed, job.trials()).mean_s
    limit_s = min(seconds.values()) * (1 + AS_FAST)
    most_bits = [wire for wire in (job.wire, *wires) if seconds.get(wire, math.inf) <= limit_s]
    return _WireTime(most_bits[0], seconds[most_bits[0]])


def _why_wire(job: Job, best: Row, wire: str, wire_s: float) -> str:
    if wire == job.wire:
        return ""
    return (
        f"; with wire={wire!r} {best.method} takes {1e3 * wire_s:.3g} ms, where with {job.wire} "
        f"it takes {1e3 * best.prediction.mean_s:.3g}"
    )


def _level_with(chosen: str, seconds: Mapping[str, float]) -> tuple[str, ...]:
    own_s = seconds[chosen]
    return tuple(
        name
        for name, s in seconds.items()
        if name != chosen and max(s, own_s) <= (1 + LEVEL) * min(s, own_s)
    )


def _why_level(level: Sequence[str]) -> str:
    if not level:
        return ""
    return f"; level with it, within the model's error of {LEVEL:.0%}: {', '.join(level)}"


def _why_ranked(to_loss: LossGap | None, *, known: bool) -> str:
    """Say what methods are compared by.

    Args:
        to_loss: what the comparison by time to equal loss rests on; None where it is by step.
        known: whether any losses of this kind of model are.
    """
    if to_loss is not None:
        on = f" (on {MEASURED_TOPOLOGY})" if to_loss.assumed else ""
        return f"; ranked by time to equal loss, as measured on {to_loss.setting}{on}"
    missing = (
        "what these methods take to an equal loss was not measured"
        if known
        else "no losses were measured for this kind of model"
    )
    return f"; ranked by time per step; {missing}"


def _why_ddp(ddp: Row, method: str, step_s: float, saving: float, to_loss: LossGap | None) -> str:
    told = f"would save {saving:.1%}" if saving > 0 else f"would take {-saving:.1%} longer"
    if to_loss is not None:
        told += (
            f" to an equal loss: {to_loss.more_steps:.3g} times as many steps "
            f"of {1e3 * step_s:.3g} ms"
        )
    return (
        f"stay with DDP: it waits {1e3 * ddp.prediction.exposed_s:.3g} ms of "
        f"{1e3 * ddp.prediction.mean_s:.3g}, and {method} {told}; "
        f"below {WORTH_IT:.0%} an exact average is worth more"
    )


def _why_gossip(
    seconds: Mapping[str, float],
    method: str,
    step_s: float,
    as_fast: Sequence[Row],
    split: Split,
    to_loss: LossGap | None,
) -> str:
    before_s, after_s = seconds[DDP], seconds[method]
    points = {
        "overlap": split.overlap_s,
        "fewer bytes on slow links": split.links_s,
        "waiting for fewer": split.tolerance_s,
    }
    if to_loss is not None:
        points["more steps"] = step_s - after_s
    parts = ", ".join(f"{name} {100 * part / before_s:.0f}" for name, part in points.items())
    others = len(as_fast) - 1
    chosen = f"; of {others + 1} graphs as fast it mixes best" if others else ""
    until = "" if to_loss is None else " to an equal loss"
    return (
        f"{method}: {1e3 * after_s:.3g} ms{until} where DDP takes {1e3 * before_s:.3g}, "
        f"a saving of {1 - after_s / before_s:.0%} (points: {parts}){chosen}"
    )
