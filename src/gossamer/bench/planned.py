"""The runs of an experiment as data, stored beside them so that readers need not load plug-ins.

Expanding an experiment imports and calls the plug-ins that it names, which may be anyone's code.
The runner does so, because its user wants to run it; readers of a folder of results use what the
runner wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from gossamer.bench.experiment import Experiment
from gossamer.bench.matrix import Matrix, Skipped, expand
from gossamer.bench.store import Store
from gossamer.bench.trials import Trials
from gossamer.bench.tuning import Study
from gossamer.engine.parts import REGISTRIES
from gossamer.errors import UserError
from gossamer.records import Started
from gossamer.registry import is_plugin

UNKNOWN = (
    "its file names plug-ins, which are not loaded to read results, and planned.json is not in the "
    "folder; gossamer bench run writes it"
)
"""Why the planned runs of an experiment are unknown."""

_NO_PARTS = {"name", "folder", "profile", "link"}
"""Keys of an experiment whose strings name no part."""


class PlannedRun(BaseModel):
    """One planned run, with the names of its parts as strings."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    workers: int
    method: str
    engine: str
    seed: int
    num_steps: int
    lr: float | None = None
    validation_share: float = 0.0
    parts: dict[str, str]
    """The fields that name a part, such as the topology."""

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, parts: dict[str, str]) -> dict[str, str]:
        if missing := {"workload", "topology"} - parts.keys():
            raise ValueError(f"no {' and no '.join(sorted(missing))}")
        return parts

    @property
    def workload(self) -> str:
        """The name of its workload."""
        return self.parts["workload"]

    @property
    def topology(self) -> str:
        """The name of its topology."""
        return self.parts["topology"]


class PlannedRuns(BaseModel):
    """All runs of an experiment, without duplicates."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    runs: list[PlannedRun]
    skipped: list[Skipped] = []
    studies: list[Study] = []


def planned_runs(matrix: Matrix) -> PlannedRuns:
    """Return the runs of a matrix as data."""
    return PlannedRuns(
        runs=[_planned(spec.id, spec.model_dump()) for spec in matrix.runs],
        skipped=matrix.skipped,
        studies=matrix.studies,
    )


def read_planned(store: Store, experiment: Experiment) -> PlannedRuns | None:
    """Return the runs of the experiment in a folder; None if plug-ins would have to be loaded.

    Args:
        store: the folder. Where it has no plan, the experiment is expanded.
        experiment: as it is stored there.
    """
    text = store.planned()
    if text is not None:
        try:
            return PlannedRuns.model_validate_json(text)
        except ValidationError:
            raise UserError(
                f"planned.json in {store.folder} must be as gossamer bench run wrote it, got "
                "something else; run the experiment again, or remove the file"
            ) from None
    if any(map(is_plugin, _parts(experiment.model_dump(exclude={"text"})))):
        return None
    return planned_runs(expand(experiment, Trials(store).outcomes()))


def recorded_runs(store: Store) -> PlannedRuns:
    """Return the runs that have records in a folder."""
    runs: list[PlannedRun] = []
    for story in store.stories():
        first = story.records[0] if story.records else None
        runs.append(_planned(story.run_id, first.spec if isinstance(first, Started) else {}))
    return PlannedRuns(runs=runs)


def _planned(run_id: str, fields: Mapping[str, Any]) -> PlannedRun:
    # A run whose first record is damaged is listed too, without its fields.
    parts = {"workload": "", "topology": ""} | {
        name: str(fields[name]) for name in REGISTRIES if name in fields
    }
    num_steps = fields.get("epochs", 0) * fields.get("steps_per_epoch", 0)
    return PlannedRun(
        id=run_id,
        workers=fields.get("workers", 0),
        method=fields.get("method", ""),
        engine=fields.get("engine", ""),
        seed=fields.get("seed", 0),
        num_steps=min(num_steps, fields.get("max_steps") or sys.maxsize),
        lr=fields.get("lr"),
        validation_share=fields.get("validation_share", 0.0),
        parts=parts,
    )


def _parts(value: Any, key: str = "") -> Iterator[str]:
    """Yield all strings of an experiment that may name a part."""
    if isinstance(value, str):
        if key not in _NO_PARTS:
            yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _parts(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _parts(inner, key)
