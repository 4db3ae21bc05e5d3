"""Turn records into tables: one row per run, step, evaluation, and (run, step, tensor)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from gossamer import workloads
from gossamer.bench.analysis.graphs import graph_names, trajectory, variants
from gossamer.bench.analysis.mixing import mixing_facts
from gossamer.bench.analysis.names import facet_names, method_names, setting_names
from gossamer.bench.analysis.reached import REACHED_SCHEMA, reach
from gossamer.bench.store import Story
from gossamer.bench.tuning import is_trial
from gossamer.engine import CENTRALIZED
from gossamer.engine.spec import facts_of
from gossamer.errors import UserError
from gossamer.records import Evaluation, Spread, Started, Step, WorkloadFacts
from gossamer.registry import is_plugin, shorten

MEASURES: dict[str, str] = {
    "gini": "Gini coefficient",
    "index_of_dispersion": "index of dispersion",
    "coefficient_of_variation": "coefficient of variation",
    "quartile_coefficient": "quartile coefficient",
}
"""The measures of dispersion and their names in reports."""

_NEEDED = {
    *("workload", "workers", "method", "topology", "engine", "seed", "algorithm", "control", "lr"),
    *("gossip_steps", "epochs", "steps_per_epoch"),
}
"""Fields that every row of runs needs."""


class Tables(NamedTuple):
    """The measurements of an experiment."""

    runs: pl.DataFrame
    """One row per run: its fields, its status, and its result if it is done."""

    steps: pl.DataFrame
    evaluations: pl.DataFrame
    dispersion: pl.DataFrame
    """One row per run, step and tensor, with the four measures."""

    trials: pl.DataFrame
    """Trials of learning rates, with the columns of ``runs``; the other tables do not have
    them."""


class RunRows(NamedTuple):
    """The rows of one run."""

    run: dict[str, Any]
    steps: pl.DataFrame
    evaluations: pl.DataFrame
    dispersion: pl.DataFrame


def tabulate(stories: Iterable[Story]) -> Tables:
    """Return the tables of an experiment; runs without a first record are left out."""
    return join([rows for story in stories if (rows := rows_of(story))], {})


def rows_of(story: Story, planned: Mapping[str, str] | None = None) -> RunRows | None:
    """Return the rows of one run; None if its first record is missing or incomplete.

    Args:
        story: its records.
        planned: the names of its parts in ``planned.json``, with the paths of plug-ins as of the
            last run.
    """
    started = story.records[0] if story.records else None
    if not isinstance(started, Started) or _NEEDED - started.spec.keys():
        return None
    spec = started.spec | dict(planned or {})
    workload = started.workload_facts or _look_up(str(spec["workload"]))
    # Fields that older records lack; with these values they are not part of the id, so that it is
    # the same run.
    spec.setdefault("evaluate_samples", workload.evaluate_samples)
    spec.setdefault("validation_share", 0.0)
    spec.setdefault("clip_norm", 0.0)
    spec.setdefault("wire", "fp32")
    spec.setdefault("fragments", 1)
    steps = [record for record in story.records if isinstance(record, Step)]
    evaluated = [record for record in story.records if isinstance(record, Evaluation)]
    evaluations = _evaluations(story.run_id, evaluated, workload)
    run = _run(story, spec, steps, workload) | _result(story, evaluations, workload)
    run |= {"parameter_bytes": started.parameter_bytes or None, "target": workload.target}
    return RunRows(run, _steps(story.run_id, steps), evaluations, _dispersion(story.run_id, steps))


def _look_up(workload: str) -> WorkloadFacts:
    """Return the facts of a workload whose records lack them."""
    if is_plugin(workload):
        return WorkloadFacts()
    try:
        return facts_of(workloads.find(workload))
    except UserError:  # the name no longer exists
        return WorkloadFacts()


def join(
    rows: Sequence[RunRows], names: Mapping[str, str], targets: Mapping[str, float] | None = None
) -> Tables:
    """Return the tables of several runs.

    Args:
        rows: of each.
        names: of methods, by run; by default those in the records.
        targets: by workload; they replace the workloads' own.
    """
    aims = {shorten(workload): target for workload, target in (targets or {}).items()}
    specs = [dict(of_run.run["spec"]) for of_run in rows]
    for spec, of_run in zip(specs, rows, strict=True):
        method = names.get(of_run.run["run_id"]) or spec["method"]
        spec["method"] = method or shorten(spec["topology"])
    trials = [is_trial(spec) for spec in specs]
    short = [shorten(spec["workload"]) for spec in specs]
    _forget_rates(specs, trials)
    facets = facet_names(specs)
    own: dict[str, Sequence[Any]] = {
        "method": method_names(specs),
        "workload": setting_names(specs, facets),
        "facet": facets,
        "twin": _twins(specs),
        "graph": graph_names(specs),
        "variant": variants(specs),
    }
    runs = [
        {key: value for key, value in of_run.run.items() if key != "spec"}
        | dict(zip(own, values, strict=True))
        | reach(of_run.run, of_run.evaluations, aims.get(aim, of_run.run["target"]))
        for of_run, aim, *values in zip(rows, short, *own.values(), strict=True)
    ]
    compared = [not trial for trial in trials]
    kept = list(itertools.compress(rows, compared))
    return Tables(
        pl.DataFrame(list(itertools.compress(runs, compared)), schema=_RUN_SCHEMA),
        _concat([of_run.steps for of_run in kept], _STEP_SCHEMA),
        _concat([of_run.evaluations for of_run in kept], _EVALUATION_SCHEMA),
        _concat([of_run.dispersion for of_run in kept], _DISPERSION_SCHEMA),
        pl.DataFrame(list(itertools.compress(runs, trials)), schema=_RUN_SCHEMA),
    )


def _forget_rates(specs: Sequence[dict[str, Any]], trials: Sequence[bool]) -> None:
    """Drop the learning rate of trials and of the runs at the rate that they chose.

    Otherwise one method with different best rates at different settings would look like several.
    """

    def alike(spec: Mapping[str, Any]) -> str:
        apart = ("lr", "seed", "validation_share")
        return repr(sorted((k, v) for k, v in spec.items() if k not in apart))

    tuned = {alike(spec) for spec in itertools.compress(specs, trials)}
    for spec in specs:
        if alike(spec) in tuned:
            spec |= {"lr": None, "validation_share": 0.0}


def _run(
    story: Story, spec: Mapping[str, Any], steps: Sequence[Step], workload: WorkloadFacts
) -> dict[str, Any]:
    ended = story.ended
    counted = [record for record in story.records if isinstance(record, Step | Evaluation)]
    return {
        "run_id": story.run_id,
        "spec": spec,
        **{name: spec[name] for name in ("workload", "workers", "engine", "seed")},
        "topology": shorten(spec["topology"]),
        "centralized": spec["topology"] == CENTRALIZED,
        "algorithm": shorten(spec["algorithm"]),
        "every": spec["every"],
        "control": shorten(spec["control"]),
        "lr": spec["lr"],
        "metric": workload.metric_name,
        "higher_is_better": workload.higher_is_better,
        "status": ended.status if ended else "damaged" if story.damage else "unfinished",
        "reason": ended.reason if ended else "",
        "damage": story.damage,
        "steps": counted[-1].step if counted else 0,
        "planned_steps": spec["epochs"] * spec["steps_per_epoch"],
        **mixing_facts(spec, steps),
        "lr_scaling": spec.get("lr_scaling", "none"),
        "highest_lr": max((step.lr for step in steps), default=None),
        "trajectory": trajectory(story.records),
        "bytes_sent": counted[-1].bytes_sent if counted else 0.0,
        "train_s": counted[-1].train_s if counted else 0.0,
    }


def _result(story: Story, evaluations: pl.DataFrame, workload: WorkloadFacts) -> dict[str, Any]:
    """Return the final and best metric of a run that is done."""
    none: dict[str, Any] = dict.fromkeys(_RESULT_SCHEMA)
    if story.ended is None or story.ended.status != "done" or evaluations.is_empty():
        return none
    sign = 1 if workload.higher_is_better else -1
    # A metric on a part of the test samples is not comparable with one on all of them.
    on_all = evaluations.filter(pl.col("samples").is_null())["average"]
    last = evaluations.row(-1, named=True)
    return none | {
        "final": last["average"],
        "best": on_all.max() if sign > 0 else on_all.min(),
        "replicas_mean": last["replicas_mean"],
        "replicas_worst": last["replicas_worst"],
        "quality": sign * last["average"],
    }


_RESULT_SCHEMA: dict[str, Any] = {
    "final": pl.Float64,
    "best": pl.Float64,
    "replicas_mean": pl.Float64,
    "replicas_worst": pl.Float64,
    "quality": pl.Float64,
}

_RUN_SCHEMA: dict[str, Any] = {
    "run_id": pl.String,
    "workload": pl.String,
    "facet": pl.String,
    "workers": pl.Int64,
    "method": pl.String,
    "engine": pl.String,
    "seed": pl.Int64,
    "topology": pl.String,
    "centralized": pl.Boolean,
    "algorithm": pl.String,
    "every": pl.Int64,
    "control": pl.String,
    "lr": pl.Float64,
    "metric": pl.String,
    "higher_is_better": pl.Boolean,
    "twin": pl.Boolean,
    "graph": pl.String,
    "variant": pl.String,
    "trajectory": pl.String,
    "status": pl.String,
    "reason": pl.String,
    "damage": pl.String,
    "steps": pl.Int64,
    "planned_steps": pl.Int64,
    "connections": pl.Float64,
    "averages_every": pl.Int64,
    "aimed": pl.Boolean,
    "acted": pl.Boolean,
    "lr_scaling": pl.String,
    "highest_lr": pl.Float64,
    "bytes_sent": pl.Float64,
    "train_s": pl.Float64,
    "modelled_s": pl.Float64,
    "parameter_bytes": pl.Int64,
    **_RESULT_SCHEMA,
    **REACHED_SCHEMA,
}

_STEP_SCHEMA: dict[str, Any] = {
    "run_id": pl.String,
    "step": pl.Int64,
    "epoch": pl.Int64,
    "lr": pl.Float64,
    "loss": pl.Float64,
    "worst_loss": pl.Float64,
    "distance": pl.Float64,
    "theta": pl.Float64,
    "rounds": pl.Int64,
    "degree": pl.Int64,
    "target": pl.Float64,
    "bytes_sent": pl.Float64,
    "train_s": pl.Float64,
    "modelled_s": pl.Float64,
}

_EVALUATION_SCHEMA: dict[str, Any] = {
    "run_id": pl.String,
    "step": pl.Int64,
    "epoch": pl.Int64,
    "average": pl.Float64,
    "replicas_mean": pl.Float64,
    "replicas_worst": pl.Float64,
    "bytes_sent": pl.Float64,
    "train_s": pl.Float64,
    "modelled_s": pl.Float64,
    "samples": pl.Int64,
}

_DISPERSION_SCHEMA: dict[str, Any] = {
    "run_id": pl.String,
    "step": pl.Int64,
    "tensor": pl.String,
    **dict.fromkeys(Spread._fields, pl.Float64),
}


def _steps(run_id: str, steps: Sequence[Step]) -> pl.DataFrame:
    columns = {
        name: [getattr(step, name, None) for step in steps]
        for name in _STEP_SCHEMA
        if name != "run_id"
    }
    return pl.DataFrame({"run_id": [run_id] * len(steps), **columns}, schema=_STEP_SCHEMA)


def _evaluations(
    run_id: str, records: Sequence[Evaluation], workload: WorkloadFacts
) -> pl.DataFrame:
    worst = min if workload.higher_is_better else max
    rows = [
        {
            "run_id": run_id,
            **record.model_dump(
                include={"step", "epoch", "average", "bytes_sent", "train_s", "samples"}
            ),
            "replicas_mean": sum(own) / len(own) if own else None,
            "replicas_worst": worst(own) if own else None,
        }
        for record in records
        for own in [list(record.replicas.values())]
    ]
    return pl.DataFrame(rows, schema=_EVALUATION_SCHEMA)


def _dispersion(run_id: str, steps: Sequence[Step]) -> pl.DataFrame:
    rows = [
        (run_id, step.dispersion_step or step.step, tensor, *spread)
        for step in steps
        for tensor, spread in step.dispersion.items()
    ]
    return pl.DataFrame(rows, schema=_DISPERSION_SCHEMA, orient="row")


def _concat(frames: Sequence[pl.DataFrame], schema: dict[str, Any]) -> pl.DataFrame:
    return pl.concat(frames) if frames else pl.DataFrame(schema=schema)


def _twins(specs: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return which runs repeat a simulated one on processes, and so have the same result."""

    def key(spec: Mapping[str, Any]) -> str:
        return repr(sorted((k, v) for k, v in spec.items() if k not in ("engine", "method")))

    simulated = {key(spec) for spec in specs if spec["engine"] == "simulated"}
    return [spec["engine"] == "distributed" and key(spec) in simulated for spec in specs]
