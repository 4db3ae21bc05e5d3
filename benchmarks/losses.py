"""The gap in loss between gossip and all-reduce at equal steps: the rows of ``gossamer plan``.

    python -m benchmarks.losses evidence/adam-stdlib-gpt.csv evidence/adam-stdlib-gpt-long.csv \
        --out src/gossamer/runtime_model/measured_losses.json

Files are those of ``benchmarks.evidence``, or folders of ``gossamer bench run``. Every method of
gossip is compared with all-reduce in the same setting, seed by seed, in final runs that are done;
trials do not count. The slope of all-reduce's loss needs a setting that was also trained four times
as long; other settings of that workload use the slope of the nearest one, which is noted. One JSON
line per row; runs that were left out are listed on stderr.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import torch
import typer

from benchmarks.evidence import Result, read
from gossamer.bench.analysis.statistics import interval
from gossamer.engine import CENTRALIZED
from gossamer.engine.parts import OPTIMIZER_REGISTRY
from gossamer.errors import UserError
from gossamer.runtime_model.losses import (
    ASSUMED_OPTIMIZERS,
    LONGER,
    MeasuredLoss,
    factor_of_steps,
    write_losses,
)
from gossamer.runtime_model.measure import kind_of
from gossamer.workloads import find

_ARM = {"method", "topology", "algorithm", "optimizer", "optimizer_options", "lr", "seed"}
"""Fields in which compared runs differ."""

_TOLD = {"workload", "workers", "batch_size", "epochs", "max_steps"}
"""Fields of a setting that are attributes of their own."""

_UNSEEN = {"engine", "log_every", "evaluate_every", "evaluate_replicas", "evaluate_samples"}
"""Fields that do not affect training."""


class Setting(NamedTuple):
    """The fields that compared runs share."""

    kind: str
    workload: str
    workers: int
    batch_size: int
    steps: int
    others: str
    """All other fields."""

    def distance(self, other: Setting) -> float:
        """Return the distance of two settings in doublings of workers, batch size and steps."""
        pairs = zip(self[2:5], other[2:5], strict=True)
        return sum(abs(math.log2(own / others)) for own, others in pairs)


class Arm(NamedTuple):
    """One way to distribute training."""

    topology: str
    algorithm: str
    optimizer: str


Seeds: TypeAlias = dict[int, Result]
Arms: TypeAlias = dict[Arm, Seeds]


def final_runs(paths: Sequence[Path], left_out: Counter[str]) -> Iterator[Result]:
    """Yield the runs that count, without duplicates.

    Args:
        paths: folders of ``gossamer bench run``, or files of ``benchmarks.evidence``.
        left_out: filled with the number of other runs, by reason.
    """
    runs = {result.spec.id: result for path in paths for result in read(path)}
    for run in runs.values():
        if reason := _why_not(run):
            left_out[reason] += 1
        else:
            yield run


def _why_not(run: Result) -> str:
    """Return why a run does not count; empty if it does."""
    spec = run.spec
    plain = (spec.control, spec.every, spec.gossip_steps, spec.outer_lr) == ("plain", 1, 1, None)
    reasons = {
        "trials": run.is_trial,
        "not done": run.final is None,
        "judged by what is no loss": spec.workload_facts.higher_is_better,
        "by more than a topology and an algorithm": not plain,
        "of an optimizer that plans do not assume": (
            spec.topology != CENTRALIZED and spec.optimizer not in ASSUMED_OPTIMIZERS
        ),
        "with a smoothing that is not the default": "smoothing" in spec.optimizer_options,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def group(runs: Iterator[Result], left_out: Counter[str]) -> dict[Setting, Arms]:
    """Return runs by setting, way of training and seed."""
    settings: dict[Setting, Arms] = {}
    for run in runs:
        spec = run.spec
        kind = _kind(spec.workload, spec.optimizer)
        if not kind:
            left_out["of no kind that plans know"] += 1
            continue
        others = spec.model_dump(mode="json", exclude=_ARM | _TOLD | _UNSEEN)
        setting = Setting(
            kind, spec.workload, spec.workers, spec.batch_size, spec.num_steps, json.dumps(others)
        )
        arm = Arm(spec.topology, spec.algorithm, spec.optimizer)
        seeds = settings.setdefault(setting, {}).setdefault(arm, {})
        if spec.seed in seeds:
            raise UserError(
                f"a way of training must have one run per setting and seed, got two of "
                f"{spec.method or spec.topology} with {_words(setting)}, seed {spec.seed}; "
                "give folders of experiments in which nothing else differs"
            )
        seeds[spec.seed] = run
    return settings


@cache
def _kind(workload: str, optimizer: str) -> str:
    parameter = torch.nn.Parameter(torch.zeros(1))
    made = OPTIMIZER_REGISTRY.parse(optimizer).make([parameter], lr=0.1)
    return kind_of(find(workload).make_model(), made)


def slopes_of(settings: Mapping[Setting, Arms]) -> dict[Setting, float]:
    """Return the gain of all-reduce per unit of ln(steps), by the setting of the shorter run."""
    slopes: dict[Setting, float] = {}
    for setting, arms in settings.items():
        longer = settings.get(setting._replace(steps=LONGER * setting.steps), {})
        short, long = _all_reduce(setting, arms), _all_reduce(setting, longer)
        shared = short.keys() & long.keys()
        if shared:
            gained = statistics.fmean(_loss(short[seed]) - _loss(long[seed]) for seed in shared)
            if gained > 0:
                slopes[setting] = gained / math.log(LONGER)
    return slopes


def _all_reduce(setting: Setting, arms: Arms) -> Seeds:
    found = [seeds for arm, seeds in arms.items() if arm.topology == CENTRALIZED]
    if len(found) > 1:
        raise UserError(
            f"a setting must have one all-reduce to compare with, got {len(found)} with "
            f"{_words(setting)}; give folders of experiments with one"
        )
    return found[0] if found else {}


def rows_from(settings: Mapping[Setting, Arms]) -> list[MeasuredLoss]:
    """Return one row per setting and way of gossip that shares a seed with all-reduce."""
    slopes = slopes_of(settings)
    rows: list[MeasuredLoss] = []
    for setting, arms in sorted(settings.items()):
        reference = _all_reduce(setting, arms)
        for arm, seeds in sorted(arms.items()):
            shared = sorted(seeds.keys() & reference.keys())
            if shared and arm.topology != CENTRALIZED:
                pairs = [(seeds[seed], reference[seed]) for seed in shared]
                rows.append(_row(setting, arm, pairs, slopes))
    return rows


def _row(
    setting: Setting,
    arm: Arm,
    pairs: Sequence[tuple[Result, Result]],
    slopes: Mapping[Setting, float],
) -> MeasuredLoss:
    loss = statistics.fmean(_loss(run) for run, _ in pairs)
    all_reduce_loss = statistics.fmean(_loss(reference) for _, reference in pairs)
    gap = interval([_loss(run) / _loss(reference) - 1 for run, reference in pairs])
    bounds = None if gap.low is None or gap.high is None else (_short(gap.low), _short(gap.high))
    near = [other for other in slopes if other.workload == setting.workload]
    source = min(near, key=lambda other: (setting.distance(other), other != setting), default=None)
    more_steps = source and _short(factor_of_steps(loss, all_reduce_loss, slopes[source]))
    runs = [run for pair in pairs for run in pair]
    return MeasuredLoss(
        kind=setting.kind,
        workload=setting.workload,
        workers=setting.workers,
        batch_size=setting.batch_size,
        steps=setting.steps,
        method=arm.topology,
        algorithm=arm.algorithm,
        optimizer=arm.optimizer,
        loss=_short(loss),
        all_reduce_loss=_short(all_reduce_loss),
        gap=_short(gap.mean),
        interval=bounds,
        seeds=len(pairs),
        more_steps=more_steps,
        slope_from="" if source in (None, setting) else _words(source, longer=True),
        commit=", ".join(sorted({run.commit for run in runs})),
        date=max(run.date for run in runs),
    )


def _loss(run: Result) -> float:
    assert run.final is not None, "those that are not done were left out"
    return run.final


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _words(setting: Setting, *, longer: bool = False) -> str:
    """Return a setting as text, with the longer one if a slope is from both."""
    steps = f"{setting.steps} to {LONGER * setting.steps}" if longer else f"{setting.steps}"
    return f"{setting.workers} workers, batches of {setting.batch_size}, {steps} steps"


def main(
    paths: Annotated[
        list[Path], typer.Argument(help="Of gossamer bench run, or files of benchmarks.evidence.")
    ],
    out: Annotated[Path, typer.Option(help="The file that is written.")],
) -> None:
    """Compare gossip with all-reduce in records, and write the rows."""
    left_out = Counter[str]()
    rows = rows_from(group(final_runs(paths, left_out), left_out))
    if left_out:
        told = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        typer.echo(f"runs left out: {told}", err=True)
    if not rows:
        raise UserError(
            "measured losses need final runs of gossip and of all-reduce that share a seed, got "
            "none; let the experiment run on, or give other folders"
        )
    write_losses(rows, out)
    for row in rows:
        print(row.model_dump_json(), flush=True)


if __name__ == "__main__":
    typer.run(main)
