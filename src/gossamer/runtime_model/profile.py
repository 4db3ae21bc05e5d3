"""Compute times and links of a training job: an immutable value, stored as a JSON file.

Measured by ``gossamer profile`` or written by hand. All predictions of the model follow from it.
Times are seconds, sizes bytes, rates bits per second of payload.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
)

from gossamer.errors import UserError, quoted
from gossamer.files import read_bounded, write_atomic

SCHEMA = 1

_MOST_BYTES = 2**24
"""Of a file."""

MAX_BUCKETS = 2**13

TRANSFORMER_ADAM = "transformer, Adam"
KINDS = (TRANSFORMER_ADAM,)
"""Kinds of model and optimizer that have measured losses: gossip costs some of them more steps."""

# Far beyond any job, and small enough that sums and products of them stay finite.
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=1e9)]
Bytes: TypeAlias = Annotated[int, Field(ge=1, le=10**15)]
Rate: TypeAlias = Annotated[float, Field(ge=1e-3, le=1e18)]
Variance: TypeAlias = Annotated[float, Field(ge=0, le=100)]
Factor: TypeAlias = Annotated[float, Field(ge=1e-6, le=1e6)]
Workers: TypeAlias = Annotated[int, Field(ge=1, le=2**20)]


class StrictValue(BaseModel):
    """A value read from a file: unknown fields and non-finite numbers are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Bucket(StrictValue):
    """Parameters whose gradients are reduced, or which are exchanged, together."""

    num_bytes: Bytes
    backward_s: Seconds
    """Time of the backward pass from the previous bucket's gradients to its own."""

    update_s: Seconds
    """Its part of the optimizer's step."""


class Link(StrictValue):
    """One direction of a link."""

    bits_s: Rate
    latency_s: Seconds = 0.0
    """From the start of a message to the arrival of its first byte."""


class Network(StrictValue):
    """Nodes of equally many workers; links inside a node and between nodes."""

    workers_per_node: Workers = 1
    inside: Link
    """A worker's link to others of its node; not used where a node has one worker."""

    between: Link | None = None
    """A node's link to all others, which its workers share; None where there was one node."""

    all_reduce: Literal["ring", "hierarchical"] = "ring"
    """One ring over all workers, as Gloo, or hierarchical, inside and between nodes, as NCCL."""

    reduce_efficiency: float = Field(default=1.0, gt=0, le=2)
    """Rate of an all-reduce over that of the links it crosses."""

    pair_efficiency: float = Field(default=1.0, gt=0, le=2)
    """Rate of a pair while all workers exchange in pairs, relative to a single pair."""

    fan_in_efficiency: float = Field(default=1.0, gt=0, le=2)
    """Rate at which a worker receives from two peers, relative to one."""


class Hooks(StrictValue):
    """CPU overhead of a method's code per step, without its passes over the parameters."""

    ddp_s: Seconds = 0.0
    gossip_s: Seconds = 0.0


class Pair(StrictValue):
    """What was measured from one rank to another and back."""

    ranks: tuple[int, int]
    link: Link


class Profile(StrictValue):
    """One training job."""

    schema_version: int = Field(default=SCHEMA, le=SCHEMA)
    name: str
    """What is trained, on what."""

    kind: str = ""
    """One of ``KINDS``, by which a plan finds measured losses; empty where it is none of them."""

    workers: Workers
    """How many workers it was measured with, or whose batches its compute times are for."""

    forward_s: Seconds
    buckets: tuple[Bucket, ...] = Field(min_length=1, max_length=MAX_BUCKETS)
    """In the order in which the backward pass completes them."""

    other_s: Seconds = 0.0
    """The rest of an iteration: input, clipping, logging."""

    mix_s: Seconds = 0.0
    """One pass over the parameters that mixes in a neighbour's."""

    hooks: Hooks = Hooks()
    """Matters where a step takes milliseconds."""

    variance: Variance = 0.0
    """Variance of the normalized compute time across workers in a step."""

    factors: tuple[Factor, ...] = ()
    """Normalized compute times as measured, mean 1; without them, a gamma distribution."""

    network: Network
    pairs: tuple[Pair, ...] = ()
    """Links as measured; ``network``, which the model uses, summarizes them."""

    environment: dict[str, str] = {}
    """Where and when it was measured."""

    @property
    def num_bytes(self) -> int:
        """Size of the parameters."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def compute_s(self) -> float:
        """Return the time of an iteration without communication."""
        return self.other_s + self.forward_s + sum(b.backward_s + b.update_s for b in self.buckets)

    def replace(self, **changes: Any) -> Profile:
        """Return the profile with some values replaced."""
        try:
            return Profile.model_validate({**self.model_dump(), **changes})
        except ValidationError as error:
            raise UserError(
                f"changes to the profile {self.name} must stay in a profile's range, got "
                f"{first_problem(error)}; use a smaller change"
            ) from error

    def with_compute(self, factor: float) -> Profile:
        """Return the profile with forward and backward pass this much longer."""
        buckets = [b.model_dump() | {"backward_s": b.backward_s * factor} for b in self.buckets]
        return self.replace(forward_s=self.forward_s * factor, buckets=buckets)

    def with_rate(self, factor: float) -> Profile:
        """Return the profile with links between nodes this much faster."""
        between = self.network.between
        if between is None:
            return self
        return self.with_between(Link(bits_s=between.bits_s * factor, latency_s=between.latency_s))

    def with_between(self, link: Link) -> Profile:
        """Return the profile with another link between nodes."""
        return self.replace(network=self.network.model_dump() | {"between": link})

    def with_variance(self, variance: float) -> Profile:
        """Return the profile with another variance of compute times."""
        return self.replace(variance=variance, factors=())

    def with_kind(self, kind: str) -> Profile:
        """Return the profile as that of a kind of model and optimizer."""
        if kind not in KINDS:
            raise UserError(
                f"a kind must be one that losses are measured for, got {quoted(kind)}; "
                f"write {' or '.join(map(repr, KINDS))}, or leave it out"
            )
        return self.replace(kind=kind)


def read_profile(path: Path) -> Profile:
    """Return the profile in a file."""
    try:
        return Profile.model_validate_json(read_bounded(path, _MOST_BYTES))
    except OSError as error:
        raise UserError(
            f"a profile must be a file that can be read, got {path}: {error.strerror}; "
            "write one with gossamer profile"
        ) from error
    except ValidationError as error:
        raise UserError(
            f"a profile must hold what gossamer profile writes, got {path} with "
            f"{first_problem(error)}; correct it, or measure again"
        ) from error


def first_problem(error: ValidationError) -> str:
    """Return the first validation error, and the field it is about."""
    first = error.errors()[0]
    where = ".".join(str(part)[:80] for part in first["loc"]) or "the file"
    return f"{where}: {first['msg']}"


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile; the file is atomic."""
    text = profile.model_dump_json(indent=2) + "\n"
    write_atomic(path, lambda aside: aside.write_text(text))
