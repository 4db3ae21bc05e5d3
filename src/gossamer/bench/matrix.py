"""From an experiment to its runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gossamer import workloads
from gossamer.bench.experiment import Block, Experiment, Method
from gossamer.bench.methods import fields_of
from gossamer.bench.strict import nearest, validated
from gossamer.engine import RunSpec
from gossamer.errors import UserError


class Skipped(NamedTuple):
    """A combination that cannot be."""

    fields: dict[str, Any]
    reason: str


class Matrix(NamedTuple):
    """All runs of an experiment, each once."""

    runs: list[RunSpec]
    skipped: list[Skipped]


def expand(experiment: Experiment) -> Matrix:
    """Return the runs of an experiment; refuse it as a whole where one of them cannot be."""
    _check_exclude(experiment)
    runs: dict[str, RunSpec] = {}
    skipped: list[Skipped] = []
    for fields in itertools.chain.from_iterable(map(_points, experiment.blocks)):
        if any(_matches(fields, pattern) for pattern in experiment.exclude):
            continue
        try:
            spec = validated(RunSpec, fields, _described(fields))
        except UserError as error:
            if not experiment.skip_impossible:
                raise UserError(
                    f"{_described(fields)}: {error}; leave it out by [[exclude]], or set "
                    "skip_impossible = true"
                ) from None
            skipped.append(Skipped(fields, str(error)))
        else:
            runs.setdefault(spec.id, spec)
    if not runs:
        raise UserError(f"{experiment.name} must have at least one run, got none; exclude less")
    return Matrix(list(runs.values()), skipped)


def _points(block: Block) -> Iterator[dict[str, Any]]:
    """Yield the fields of every run of a block, those that differ most slowly first."""
    _check_fields({*block.run, *block.axes})
    for method in block.methods:
        _check_fields(method.fields)
    axes: list[list[tuple[str, Any]]] = [
        [(name, value) for value in values] for name, values in block.axes.items()
    ]
    for workload, workers, method, engine, seed in itertools.product(
        block.workload, block.workers, block.methods, block.engine, block.seeds
    ):
        for chosen in itertools.product(*axes):
            common: dict[str, Any] = {
                "workload": workload,
                "workers": workers,
                "engine": engine,
                "seed": seed,
                **_budget(block),
                **block.run,
                **dict(chosen),
            }
            yield common | _method_fields(method, common) | {"method": method.name}


def _method_fields(method: Method, common: Mapping[str, Any]) -> dict[str, Any]:
    recipe = workloads.find(common["workload"]).recipe
    epochs = common.get("epochs", recipe.epochs)
    return fields_of(method.method, common["workers"], epochs) | method.fields


def _budget(block: Block) -> dict[str, float]:
    limits = {
        "max_bytes": block.budget.bytes_mb and block.budget.bytes_mb * 1e6,
        "max_train_s": block.budget.train_s,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


def _check_fields(names: Any) -> None:
    taken = {"workload", "workers", "engine", "seed", "method"}
    free = [name for name in RunSpec.model_fields if name not in taken]
    for name in names:
        if name not in free:
            raise UserError(f"a run has no field {name!r} to set; {nearest(name, free)}")


def _check_exclude(experiment: Experiment) -> None:
    for pattern in experiment.exclude:
        for name in pattern:
            if name not in RunSpec.model_fields:
                hint = nearest(name, RunSpec.model_fields)
                raise UserError(f"[[exclude]]: a run has no field {name!r}; {hint}")


def _matches(fields: Mapping[str, Any], pattern: Mapping[str, list[Any]]) -> bool:
    return all(fields.get(name) in values for name, values in pattern.items())


def _described(fields: Mapping[str, Any]) -> str:
    return f"{fields['method']} on {fields['workers']} workers of {fields['workload']}"
