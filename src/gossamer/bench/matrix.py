"""Expand an experiment into its runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from gossamer import workloads
from gossamer.bench.clock import make_clocks
from gossamer.bench.experiment import Block, Budget, Experiment
from gossamer.bench.methods import fields_of
from gossamer.bench.modelled import ModelledTime
from gossamer.bench.strict import validated
from gossamer.bench.tuning import Outcomes, Setting, Study, changed
from gossamer.engine import RunSpec
from gossamer.engine.parts import with_absolute_paths, with_algorithm
from gossamer.errors import ImpossibleError, UserError, nearest, quoted
from gossamer.registry import absolute, shorten

MAX_POINTS = 2**14
"""The most combinations of an experiment."""

_TAKEN = {"workload", "workers", "engine", "seed", "method"}
"""Fields that have keys of their own in an experiment."""


class Skipped(NamedTuple):
    """An impossible combination, such as a torus of 7 workers."""

    fields: dict[str, Any]
    reason: str


class Matrix(NamedTuple):
    """All runs of an experiment that are known so far, without duplicates."""

    runs: list[RunSpec]
    skipped: list[Skipped]
    studies: list[Study] = []  # noqa: RUF012 - never changed
    """One per setting that is tuned; more runs follow while one is not complete."""


def expand(experiment: Experiment, outcomes: Outcomes | None = None) -> Matrix:
    """Return the runs of an experiment; raise if one of them is impossible.

    Args:
        experiment: what is compared.
        outcomes: results of trials, which decide on the runs that follow where rates are tuned.
    """
    _check_size(experiment)
    folder = Path(experiment.folder)
    # Validate what only reports use now, not after hours of training.
    make_clocks(experiment)
    experiment.by_workload("target")
    matrix = _MatrixBuilder(experiment)
    settings: dict[str, Setting] = {}
    untuned: list[RunSpec] = []
    for block in experiment.blocks:
        limited = _limiter(block.budget, folder)
        for point in _points(block, folder):
            spec = matrix.make(point.fields, limited)
            if spec is None:
                continue
            if block.tune is None:
                matrix.add(spec)
                untuned.append(spec)
            else:
                setting = Setting(point.common, block.tune)
                settings.setdefault(setting.key, setting).add(spec)
    for setting, spec in itertools.product(settings.values(), untuned):
        setting.refuse_untuned(spec)
    studies = [setting.study(outcomes or {}, matrix.add) for setting in settings.values()]
    return matrix.finish(studies)


def _check_size(experiment: Experiment) -> None:
    """Raise for more runs than can be expanded in a minute, before expanding any."""
    count = sum(block.num_points for block in experiment.blocks)
    if count > MAX_POINTS:
        raise UserError(
            f"an experiment may have up to {MAX_POINTS:,} combinations, trials included, got "
            f"{quoted(count)} in {experiment.name}; split it into several"
        )


@final
class _MatrixBuilder:
    """Collects runs, without those that are excluded."""

    def __init__(self, experiment: Experiment) -> None:
        folder = Path(experiment.folder)
        self._experiment = experiment
        self._excluded = _Excluded([_absolute(pattern, folder) for pattern in experiment.exclude])
        self._runs: dict[str, RunSpec] = {}
        self._skipped: list[Skipped] = []

    def make(self, fields: dict[str, Any], limited: Callable[[RunSpec], RunSpec]) -> RunSpec | None:
        """Return a run, or None if it is excluded or impossible."""
        if self._excluded.covers(fields):
            return None
        try:
            spec = limited(validated(RunSpec, fields, _described(fields)))
        except ImpossibleError as error:
            if not self._experiment.skip_impossible:
                raise UserError(
                    f"{error}; leave it out with [[exclude]], or set skip_impossible = true"
                ) from None
            self._skipped.append(Skipped(fields, str(error)))
            return None
        return None if self._excluded.covers(spec.model_dump()) else spec

    def add(self, spec: RunSpec) -> str:
        """Add a run, unless it is a duplicate; return its id."""
        same = self._runs.setdefault(spec.id, spec)
        if same.method != spec.method:
            raise UserError(
                f"methods with different names must differ, got {same.method!r} and "
                f"{spec.method!r}, which are the same run; remove one of them"
            )
        return spec.id

    def finish(self, studies: list[Study]) -> Matrix:
        """Return all runs."""
        self._excluded.check_used()
        if not self._runs:
            name = self._experiment.name
            raise UserError(f"{name} must have at least one run, got none; exclude less")
        return Matrix(list(self._runs.values()), self._skipped, studies)


def _absolute(pattern: Mapping[str, list[Any]], folder: Path) -> dict[str, list[Any]]:
    return {
        _field(name): [with_absolute_paths({name: value}, folder)[name] for value in values]
        for name, values in pattern.items()
    }


def _field(name: str) -> str:
    """Return the field of a run that a key stands for."""
    return "algorithm" if name == "order" else name


class _Excluded:
    """The tables of ``[[exclude]]``: runs that match one of them are left out."""

    def __init__(self, patterns: Sequence[Mapping[str, list[Any]]]) -> None:
        for name in itertools.chain.from_iterable(patterns):
            if name not in RunSpec.model_fields:
                hint = nearest(name, RunSpec.model_fields)
                raise UserError(f"[[exclude]]: a run has no field {name!r}; {hint}")
        self._patterns = patterns
        self._used: set[int] = set()

    def covers(self, fields: Mapping[str, Any]) -> bool:
        found = [
            number
            for number, pattern in enumerate(self._patterns)
            if all(fields.get(name) in values for name, values in pattern.items())
        ]
        self._used.update(found)
        return bool(found)

    def check_used(self) -> None:
        for number, pattern in enumerate(self._patterns):
            if number not in self._used:
                raise UserError(
                    f"[[exclude]] must match at least one run, got {dict(pattern)}, which matches "
                    "none; correct or remove it"
                )


class _Point(NamedTuple):
    """One combination of a block."""

    common: dict[str, Any]
    """Fields that are not set by the method."""

    fields: dict[str, Any]
    """All fields that are set."""


def _points(block: Block, folder: Path) -> Iterator[_Point]:
    """Yield every combination of a block; the last axis varies fastest."""
    _check_fields(block)
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
            usual = workloads.find(absolute(workload, folder)).recipe.epochs
            epochs = {**common, **method.fields}.get("epochs", usual)
            epochs = epochs if isinstance(epochs, int) else usual
            own = fields_of(method.method, workers, epochs, folder)
            _check_method(method.name, own, block)
            layers = [with_algorithm(layer) for layer in (common, own, method.fields)]
            fields = {**layers[0], **layers[1], **layers[2], "method": method.name}
            yield _Point(common, with_absolute_paths(fields, folder))


def _budget(block: Block) -> dict[str, float]:
    limits = {
        "max_bytes": block.budget.bytes_mb and block.budget.bytes_mb * 1e6,
        "max_train_s": block.budget.train_s,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


def _limiter(budget: Budget, folder: Path) -> Callable[[RunSpec], RunSpec]:
    """Return a function that limits a run's steps to the budget's modelled time."""
    if budget.modelled_s is None or budget.profile is None:
        return lambda spec: spec
    modelled = ModelledTime(budget.modelled_s, folder / budget.profile)

    def limited(spec: RunSpec) -> RunSpec:
        steps = modelled.steps_of(spec)
        return changed(spec, {"max_steps": min(steps, spec.max_steps or steps)})

    return limited


def _check_fields(block: Block) -> None:
    """Raise for an unknown field, and for a field that is set in two places."""
    free = [name for name in (*RunSpec.model_fields, "order") if name not in _TAKEN]
    for name in itertools.chain(block.run, block.axes, *(m.fields for m in block.methods)):
        if name not in free:
            raise UserError(f"a run has no field {name!r} to set; {nearest(name, free)}")
    for method in block.methods:
        for name in block.axes.keys() & {*block.run, *method.fields}:
            raise UserError(
                f"a field must be set in one place, got {name!r} in axes and also in run or in "
                f"{method.name!r}; remove one of them"
            )
    if block.tune is not None:
        _check_tuned(block)


def _check_tuned(block: Block) -> None:
    """Raise for a field that tuning sets."""
    for method in block.methods:
        for name in ("lr", "validation_share"):
            if name in {*block.run, *block.axes, *method.fields}:
                raise UserError(
                    f"where learning rates are tuned, tune sets {name}, got it also in run, in "
                    f"axes or in {method.name!r}; remove it there"
                )


def _check_method(name: str, fields: Mapping[str, Any], block: Block) -> None:
    """Raise if a method sets a field that the experiment varies, which would override it."""
    for field in fields:
        axes = {_field(name) for name in block.axes}
        if field in _TAKEN or field in axes or (field == "lr" and block.tune is not None):
            raise UserError(
                f"a method must not set a field that the experiment varies, got {field!r} from "
                f"{name!r}; return other fields"
            )


def _described(fields: Mapping[str, Any]) -> str:
    return f"{fields['method']} on {fields['workers']} workers of {shorten(fields['workload'])}"
