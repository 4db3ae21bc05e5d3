"""Tuning of learning rates, with the same trials for every method.

A trial trains on a part of the training samples and is evaluated on the rest
(``validation_share``). All methods of a setting try the same rates with the same seeds. While the
best rate of any of them is the smallest or the largest, all get one more on that side, up to a
limit. The runs that are compared are others: on all training samples, with other seeds, evaluated
on the test samples.

The set of runs is a pure function of the experiment and of the results of trials so far: after an
interruption it is the same.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from pydantic import BaseModel, ConfigDict

from gossamer.bench.experiment import Tune
from gossamer.bench.strict import validated
from gossamer.engine import RunSpec
from gossamer.errors import UserError
from gossamer.registry import shorten

Outcomes: TypeAlias = Mapping[str, float | None]
"""Results of trials, by run: the metric of the average model; None for those that diverged."""

WORST = -math.inf
"""The quality of a rate at which a trial diverged."""


class Rate(BaseModel):
    """One learning rate of a method: its trials and their quality."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    lr: float
    trials: list[str]
    """Ids of runs, one per seed."""

    quality: float | None
    """Mean over trials of the metric, negated where lower is better; −∞ if one diverged; None if
    one has no result yet."""


class TunedMethod(BaseModel):
    """The state of tuning one method."""

    model_config = ConfigDict(frozen=True)

    name: str
    rates: list[Rate]
    """The same for all methods of a study."""

    best: float | None = None
    """The rate of its final runs; None while trials are left."""

    edge: str = ""
    """``lowest`` or ``highest`` if the best is the last rate on that side."""

    diverged: bool = False
    """Whether trials diverged at every rate; the smallest then counts as the best."""

    final: list[str] = []
    """Its final runs."""


class Study(BaseModel):
    """The tuning of all methods at one setting."""

    model_config = ConfigDict(frozen=True)

    setting: dict[str, Any]
    """The fields that all of its runs share."""

    given: list[float]
    """Rates of the experiment; more are added while the best is at an edge."""

    extensions: int
    """The most rates that are added on each side."""

    seeds: list[int]
    """Seeds of trials."""

    final_seeds: list[int]
    validation: float
    """Share of the training samples that trials are evaluated on."""

    methods: list[TunedMethod]

    @property
    def over(self) -> bool:
        """Whether every method has its best rate."""
        return all(method.best is not None for method in self.methods)


@final
class Setting:
    """Methods that are tuned together: the same rates, seeds and samples for all.

    Args:
        common: fields of all of its runs.
        tune: the trials.
    """

    def __init__(self, common: Mapping[str, Any], tune: Tune) -> None:
        self._common = {name: value for name, value in common.items() if name != "seed"}
        self._tune = tune
        self._runs: dict[str, dict[int, RunSpec]] = {}
        """By method and seed."""

    @property
    def key(self) -> str:
        """A string that is unique to the setting."""
        return json.dumps([self._common, self._tune.model_dump()], sort_keys=True)

    def add(self, spec: RunSpec) -> None:
        """Add a run of a method; its learning rate is ignored."""
        runs = self._runs.setdefault(spec.method, {})
        if any(changed(other, {"seed": spec.seed}) != spec for other in runs.values()):
            raise UserError(
                "methods that are tuned together must have different names, got two with the name "
                f"{spec.method!r}; rename one of them"
            )
        runs[spec.seed] = spec

    def refuse_untuned(self, spec: RunSpec) -> None:
        """Raise if an untuned run would be mistaken for one of a method that is tuned here."""
        tuned = next(iter(self._runs.get(spec.method, {}).values()), None)
        if tuned is not None and changed(tuned, {"seed": spec.seed, "lr": spec.lr}) == spec:
            raise UserError(
                f"a method must either be tuned or have a fixed rate, got {spec.method!r} with "
                f"both on {spec.workers} workers; give it another name where it is not tuned"
            )

    def study(self, outcomes: Outcomes, add: Callable[[RunSpec], str]) -> Study:
        """Return the state of tuning.

        Args:
            outcomes: results of trials.
            add: called with every run that is known, trials first; returns its id.
        """
        tune = self._tune
        trials: dict[str, dict[float, list[str]]] = {method: {} for method in self._runs}

        def quality(method: str, lr: float) -> float | None:
            first = next(iter(self._runs[method].values()))
            changes = {"lr": lr, "validation_share": tune.validation}
            own = [add(changed(first, changes | {"seed": seed})) for seed in tune.seeds]
            trials[method][lr] = own
            return _mean_quality(own, outcomes, first.make_workload().higher_is_better)

        found = search(tune, list(self._runs), quality)
        final = {
            method: [
                add(changed(spec, {"lr": found.grid[place]}))
                for spec in self._runs[method].values()
            ]
            for method, place in found.best.items()
        }
        return Study(
            setting=self._common,
            given=tune.lr,
            extensions=tune.extensions,
            seeds=tune.seeds,
            final_seeds=sorted({seed for runs in self._runs.values() for seed in runs}),
            validation=tune.validation,
            methods=[
                _tuned_method(method, found, trials[method], final.get(method, []))
                for method in self._runs
            ],
        )


def study_names(studies: Sequence[Study]) -> list[str]:
    """Return the name of each study: workload, scale, and the fields in which studies differ."""
    settings = [study.setting for study in studies]
    differing = [
        field
        for field in dict.fromkeys(itertools.chain.from_iterable(settings))
        if field not in ("workload", "workers")
        and any(setting.get(field) != settings[0].get(field) for setting in settings)
    ]
    return [
        ", ".join(
            [f"{shorten(setting['workload'])} on {setting['workers']} workers"]
            + [f"{field}={setting.get(field)}" for field in differing]
        )
        for setting in settings
    ]


def is_trial(spec: Mapping[str, Any]) -> bool:
    """Return whether a run is a trial, which tunes a learning rate and is not compared."""
    return bool(spec.get("validation_share"))


def changed(spec: RunSpec, changes: Mapping[str, Any]) -> RunSpec:
    """Return a run with some fields changed."""
    return validated(RunSpec, {**spec.model_dump(), **changes}, f"{spec.method} with {changes}")


class Found(NamedTuple):
    """The rates that are tried, and each method's best, as far as they are known."""

    grid: list[float]
    quality: dict[str, list[float | None]]
    """By method, for each rate of the grid."""

    best: dict[str, int]
    """By method, the index of its best rate; empty while trials are left."""


def search(
    tune: Tune, methods: Sequence[str], quality: Callable[[str, float], float | None]
) -> Found:
    """Return which rates to try next, given the results so far.

    Args:
        tune: the initial rates, and how many may be added.
        methods: the methods that try the same rates.
        quality: of a method at a rate, more is better; None if it is not known yet.
    """
    below = above = 0
    while True:
        grid = _grid(tune.lr, below, above)
        known = {method: [quality(method, lr) for lr in grid] for method in methods}
        values = {
            method: [value for value in of_method if value is not None]
            for method, of_method in known.items()
        }
        if any(len(of_method) < len(grid) for of_method in values.values()):
            return Found(grid, known, {})
        best = {method: best_place(of_method) for method, of_method in values.items()}
        lower = 0 in best.values() and below < tune.extensions
        higher = len(grid) - 1 in best.values() and above < tune.extensions
        if not lower and not higher:
            return Found(grid, known, best)
        below, above = below + lower, above + higher


def _mean_quality(
    trials: Sequence[str], outcomes: Outcomes, higher_is_better: bool
) -> float | None:
    """Return the quality of a rate; −∞ if a trial diverged, None while one is left."""
    if not all(run_id in outcomes for run_id in trials):
        return None
    metrics = [outcomes[run_id] for run_id in trials]
    known = [metric for metric in metrics if metric is not None]
    if len(known) < len(metrics):
        return WORST
    return statistics.fmean(known) * (1 if higher_is_better else -1)


def _tuned_method(
    name: str, found: Found, trials: Mapping[float, list[str]], final: list[str]
) -> TunedMethod:
    """Return the result of a search for one of its methods."""
    rates = [
        Rate(lr=lr, trials=trials[lr], quality=quality)
        for lr, quality in zip(found.grid, found.quality[name], strict=True)
    ]
    if name not in found.best:
        return TunedMethod(name=name, rates=rates)
    place = found.best[name]
    return TunedMethod(
        name=name,
        rates=rates,
        best=rates[place].lr,
        edge=edge_of(place, len(rates)),
        diverged=rates[place].quality == WORST,
        final=final,
    )


def edge_of(place: int, num_rates: int) -> str:
    """Return at which edge of the grid an index is; empty if it is inside."""
    return {0: "lowest", num_rates - 1: "highest"}.get(place, "")


def _grid(given: Sequence[float], below: int, above: int) -> list[float]:
    """Return the rates, extended at both ends in the ratio of the last two there."""
    grid = list(given)
    for _ in range(below):
        grid.insert(0, _rounded(grid[0] * grid[0] / grid[1]))
    for _ in range(above):
        grid.append(_rounded(grid[-1] * grid[-1] / grid[-2]))
    return grid


def _rounded(lr: float) -> float:
    return float(f"{lr:.6g}")


def best_place(qualities: Sequence[float]) -> int:
    """Return the index of the best; of equal ones one inside the grid, and the smaller rate.

    If all diverged it is the smallest, so that the grid is extended downwards.

    Args:
        qualities: of rates from the smallest to the largest; −∞ for those that diverged.
    """
    most = max(qualities)
    if most == WORST:
        return 0
    places = [place for place, quality in enumerate(qualities) if quality == most]
    inside = [place for place in places if 0 < place < len(qualities) - 1]
    return (inside or places)[0]
