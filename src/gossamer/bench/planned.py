"""Which runs an experiment has, as data: kept beside them, so that no reader runs plug-ins.

Expanding an experiment loads and calls what it names, which may be anyone's code. A runner does
so, for someone who wants it run; who only looks at a folder of results reads what the runner wrote.
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
"""Why it is not known which runs an experiment has."""

_NO_PARTS = {"name", "folder", "profile", "link"}
"""Keys of an experiment whose strings are looked up nowhere."""


class PlannedRun(BaseModel):
    """What tells a run from others, without anything that it names."""

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
    """The fields that name a part."""

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, parts: dict[str, str]) -> dict[str, str]:
        if missing := {"workload", "topology"} - parts.keys():
            raise ValueError(f"no {' and no '.join(sorted(missing))}")
        return parts

    @property
    def workload(self) -> str:
        """What is trained."""
        return self.parts["workload"]

    @property
    def topology(self) -> str:
        """How workers are connected."""
        return self.parts["topology"]


class PlannedRuns(BaseModel):
    """All runs of an experiment, each once."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    runs: list[PlannedRun]
    skipped: list[Skipped] = []
    studies: list[Study] = []


def planned_runs(matrix: Matrix) -> PlannedRuns:
    """Return what readers need of an experiment's runs."""
    return PlannedRuns(
        runs=[_planned(spec.id, spec.model_dump()) for spec in matrix.runs],
        skipped=matrix.skipped,
        studies=matrix.studies,
    )


def read_planned(store: Store, experiment: Experiment) -> PlannedRuns | None:
    """Return the runs of the experiment in a folder; None where only plug-ins would tell.

    Args:
        store: the folder. Those of before plans were kept have none, and are expanded.
        experiment: as it is kept there.
    """
    text = store.planned()
    if text is not None:
        try:
            return PlannedRuns.model_validate_json(text)
        except ValidationError:
            raise UserError(
                f"{store.folder} must have a planned.json that gossamer bench run has written, got "
                "another one; run the experiment again, or remove the file"
            ) from None
    if any(map(is_plugin, _parts(experiment.model_dump(exclude={"text"})))):
        return None
    return planned_runs(expand(experiment, Trials(store).outcomes()))


def recorded_runs(store: Store) -> PlannedRuns:
    """Return the runs of which a folder has records, as far as those tell."""
    runs: list[PlannedRun] = []
    for story in store.stories():
        first = story.records[0] if story.records else None
        runs.append(_planned(story.run_id, first.spec if isinstance(first, Started) else {}))
    return PlannedRuns(runs=runs)


def _planned(run_id: str, fields: Mapping[str, Any]) -> PlannedRun:
    # A damaged record tells nothing; its run is listed all the same.
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
