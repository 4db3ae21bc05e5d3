"""The records of a run: typed, one JSON object per line.

The first record of a run holds its specification and the schema's version. Readers raise on a newer
version, and on unknown fields.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gossamer.errors import UserError

SCHEMA = 1

Status: TypeAlias = Literal["done", "diverged", "timeout", "error"]

RESULTS: frozenset[Status] = frozenset({"done", "diverged"})
"""Final statuses: such a run is not retried."""


Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
"""An integer that fits in a column of a table."""

_Limited: TypeAlias = Annotated[int, Field(ge=0, le=10**9)]


class _KnownFields(BaseModel):
    """The fields of a specification that readers use, where present."""

    model_config = ConfigDict(extra="allow", strict=True)

    workload: str = ""
    topology: str = ""
    control: str = ""
    method: str = ""
    engine: str = ""
    algorithm: str = ""
    every: _Limited = 1
    workers: _Limited = 0
    gossip_steps: _Limited = 0
    epochs: _Limited = 0
    steps_per_epoch: _Limited = 0
    max_steps: Count | None = None
    seed: Count = 0
    lr: float | None = None
    validation_share: float = 0.0


def _with_known_types(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a specification that tables can hold; one number that is too large breaks them all."""
    spec = _as_now(spec)
    _KnownFields.model_validate(spec)
    return spec


def _as_now(spec: dict[str, Any]) -> dict[str, Any]:
    """Upgrade a specification from before there were algorithms."""
    if "algorithm" in spec or not isinstance(spec.get("order"), str):
        return spec
    now = {name: value for name, value in spec.items() if name != "order"}
    now |= {"algorithm": spec["order"], "every": 1}
    if local := re.fullmatch(r"local_sgd\(every=(\d{1,5})\)", str(spec.get("topology"))):
        now |= {"topology": "complete", "every": int(local[1])}
    return now


class _Record(BaseModel):
    # NaN and infinities are kept: a diverged run is a result.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class WorkloadFacts(BaseModel):
    """What an analysis needs of a workload, whose code may no longer exist."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric_name: str = "metric"
    higher_is_better: bool = True
    target: float | None = None
    """The metric at which the workload counts as trained."""

    evaluate_samples: Count = 0
    """The default of its recipe."""


class Started(_Record):
    """A run began."""

    kind: Literal["started"] = "started"
    schema_version: int = Field(default=SCHEMA, le=SCHEMA)
    run_id: str
    spec: Annotated[dict[str, Any], AfterValidator(_with_known_types)]
    """The specification, with every default filled in."""

    environment: dict[str, str]
    norms_every: Count = 0
    """Steps between two stored norms; 0 where none are stored."""

    workload_facts: WorkloadFacts | None = None
    """None in old records."""

    parameter_bytes: Count = 0
    """Size of the parameters that one worker trains; 0 in old records."""


class Spread(NamedTuple):
    """How unequal a tensor's norm is over replicas, just before they are averaged."""

    gini: float
    index_of_dispersion: float
    coefficient_of_variation: float
    quartile_coefficient: float


class Step(_Record):
    """One training step, measured after it."""

    kind: Literal["step"] = "step"
    step: Count
    """Steps taken so far."""

    epoch: Count
    lr: float
    loss: float
    """Mean over workers, each of its batch at its own parameters, before the update."""

    worst_loss: float
    distance: float
    """Consensus distance Ξ between workers, estimated from sketches."""

    theta: float
    """Θ: how far the next round of the schedule would move workers."""

    dispersion: dict[str, Spread]
    """Of each parameter tensor; empty where workers hold one model, and where none were mixed
    since the record before."""

    dispersion_step: Count | None = None
    """The step it was measured at: the last one that was mixed. None in old records: ``step``."""

    rounds: Count
    """How often this step mixed, or the next one does where exchanges overlap with gradients."""

    degree: Count
    """The most neighbours that any worker has in these rounds."""

    target: float | None
    """The control's target for the distance."""

    bytes_sent: float
    """By the average worker so far."""

    train_s: float
    """Time in training steps so far, without evaluation and records."""


class Norms(_Record):
    """L2 norms of every tensor on every replica, just before they are averaged.

    They are large, so they are stored in a separate file, not as a line among the other records.
    """

    kind: Literal["norms"] = "norms"
    step: Count
    """Steps taken so far."""

    every: Count
    """Steps between two of them."""

    tensors: list[str]
    norms: list[list[float]]
    """For each tensor the norms of all workers."""


class Evaluation(_Record):
    """The metric on the test data, or on the validation samples of a run that has any."""

    kind: Literal["evaluation"] = "evaluation"
    step: Count
    epoch: Count
    average: float
    """Of the model with the average parameters."""

    replicas: dict[int, float]
    """Of workers' own models: of all, or of some where there are many."""

    bytes_sent: float
    train_s: float
    samples: Count | None = None
    """The number of samples that were used; None for all of them, as at the end."""


class Ended(_Record):
    """A run ended."""

    kind: Literal["ended"] = "ended"
    status: Status
    reason: str = ""
    """The reason of a status other than done."""

    steps: Count = 0
    train_s: float = 0.0
    """Time in training steps, without evaluation and records."""


Record: TypeAlias = Annotated[
    Started | Step | Norms | Evaluation | Ended, Field(discriminator="kind")
]

_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)


def to_line(record: Record) -> str:
    """Return a record as one line of JSON."""
    return record.model_dump_json()


def from_line(line: str) -> Record:
    """Parse a line of JSON as a record."""
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        version = re.search(r'"schema_version": ?([0-9]{1,18})', line)
        if version and int(version[1]) > SCHEMA:
            raise UserError(
                f"records must be of schema {SCHEMA} or older, got {version[1]}; read them with "
                "the version of gossamer that wrote them"
            ) from error
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise UserError(
            f"a record must be a line that gossamer wrote, got {line[:80]!r} "
            f"({where}{first['msg']}); remove the line, or repeat the run"
        ) from error
