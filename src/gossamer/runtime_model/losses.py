"""The measured loss gap of gossip to all-reduce at equal steps, and the steps that close it.

Rows come from experiments, by ``python -m benchmarks.losses``, and are a file of the package. Where
gossip at equal steps has the higher loss, a shorter step need not give a shorter time to loss: with
L and L* the losses of gossip and all-reduce after T steps, and s how much all-reduce gains per unit
of ln(steps),

    s = (L*(T) − L*(4T)) / ln 4,      more_steps = exp((L(T) − L*(T)) / s), at least 1.

See docs/adam.md for where the loss comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, TypeAlias, final

from pydantic import Field, ValidationError

from gossamer.errors import UserError
from gossamer.files import read_bounded, write_atomic
from gossamer.runtime_model.profile import StrictValue, Workers, first_problem

SCHEMA = 1

LONGER = 4
"""Ratio of the steps of the two runs that a slope is computed from."""

MEASURED_TOPOLOGY = "one_peer_exponential"
"""Its losses are used for topologies without rows: the gap was not found to depend on the graph."""

ASSUMED_OPTIMIZERS = ("smooth_adam", "smooth_adamw")
"""Of gossip, in a plan: what docs/adam.md advises."""

_PACKAGED = Path(__file__).with_name("measured_losses.json")
_MOST_BYTES = 2**24
_MOST_ROWS = 2**14
_MOST_FACTOR = 1e6
"""Cap on the factor of steps: beyond it the exact value does not matter."""

_Name: TypeAlias = Annotated[str, Field(max_length=400)]
_Count: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
_Loss: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]
_Share: TypeAlias = Annotated[float, Field(ge=-1e9, le=1e9)]


@final
class MeasuredLoss(StrictValue):
    """One configuration of gossip in one setting, against all-reduce in the same."""

    kind: Annotated[_Name, Field(min_length=1)]
    """Of model and optimizer: one of ``profile.KINDS``."""

    workload: _Name
    workers: Workers
    batch_size: _Count
    """Samples per worker and step."""

    steps: _Count
    method: _Name
    """The topology."""

    algorithm: _Name
    optimizer: _Name
    loss: _Loss
    """In the unit of the workload's metric, mean over seeds, as the next one."""

    all_reduce_loss: _Loss
    gap: _Share
    """loss / all_reduce_loss − 1 of runs with one seed, mean over seeds."""

    interval: tuple[_Share, _Share] | None
    """95 % of the gap, by Student's t; None for one seed."""

    seeds: _Count
    more_steps: Annotated[float, Field(ge=1, le=_MOST_FACTOR)] | None
    """Factor of steps to reach all-reduce's loss; None where no slope is known."""

    slope_from: _Name = ""
    """The setting whose slope was taken; empty where it is this one's own, or none is known."""

    commit: _Name
    date: _Name
    """Of the last run."""

    @property
    def setting(self) -> str:
        """In words."""
        return (
            f"{self.workload} with {self.workers} workers, batches of {self.batch_size}, "
            f"{self.steps} steps"
        )


class _File(StrictValue):
    schema_version: int = Field(default=SCHEMA, le=SCHEMA)
    rows: tuple[MeasuredLoss, ...] = Field(max_length=_MOST_ROWS)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossGap:
    """The loss gap of a plan's method to DDP, from the nearest measured setting."""

    gap: float
    """Loss above DDP's at equal steps, relative to DDP's."""

    more_steps: float | None
    """Factor of steps to reach DDP's loss; None where that is not known."""

    setting: str = ""
    """The measured setting; empty for DDP itself."""

    workers: int | None = None
    """How many workers it was measured with."""

    assumed: bool = False
    """Whether it was measured on another topology, ``MEASURED_TOPOLOGY``."""


REFERENCE = LossGap(gap=0.0, more_steps=1.0)
"""The gap of DDP itself, the baseline."""


def factor_of_steps(loss: float, all_reduce_loss: float, slope: float) -> float:
    """Return the factor of steps that gossip needs to reach all-reduce's loss, at least 1.

    Args:
        loss: of gossip.
        all_reduce_loss: after as many steps.
        slope: what all-reduce gains per unit of ln(steps), above 0.

    >>> round(factor_of_steps(3.1, 3.0, 0.5), 3)
    1.221
    """
    exponent = max(0.0, loss - all_reduce_loss) / slope
    return math.exp(min(exponent, math.log(_MOST_FACTOR)))


def comparable(losses: Sequence[MeasuredLoss], algorithm: str, every: int) -> list[MeasuredLoss]:
    """Return the rows that were measured with the optimizer that a plan assumes.

    Args:
        losses: of one kind of model.
        algorithm: of gossip.
        every: steps from one exchange to the next; nothing but 1 is measured.
    """
    if every != 1:
        return []
    return [
        row for row in losses if row.algorithm == algorithm and row.optimizer in ASSUMED_OPTIMIZERS
    ]


def nearest_gap(losses: Sequence[MeasuredLoss], topology: str, workers: int) -> LossGap | None:
    """Return the gap measured nearest to a topology and a number of workers; None without rows.

    Ties are broken towards a real job: the most steps, then the largest batches.

    Args:
        losses: as ``comparable`` returns them.
        topology: one without rows takes those of ``MEASURED_TOPOLOGY``.
        workers: how many.
    """
    own = [row for row in losses if row.method == topology]
    found = own or [row for row in losses if row.method == MEASURED_TOPOLOGY]
    if not found:
        return None

    def distance(row: MeasuredLoss) -> tuple[bool, float, int, int, str]:
        apart = abs(math.log(row.workers / workers))
        return row.more_steps is None, apart, -row.steps, -row.batch_size, row.workload

    row = min(found, key=distance)
    return LossGap(
        gap=row.gap,
        more_steps=row.more_steps,
        setting=row.setting,
        workers=row.workers,
        assumed=not own,
    )


def read_losses(path: Path = _PACKAGED) -> tuple[MeasuredLoss, ...]:
    """Return the rows of a file; by default those that come with the package."""
    try:
        return _File.model_validate_json(read_bounded(path, _MOST_BYTES)).rows
    except OSError as error:
        raise UserError(
            f"measured losses must be a file that can be read, got {path}: {error.strerror}; "
            "write one with python -m benchmarks.losses"
        ) from error
    except ValidationError as error:
        raise UserError(
            f"measured losses must be what python -m benchmarks.losses writes, got {path} with "
            f"{first_problem(error)}; write it again"
        ) from error


@cache
def packaged_losses() -> tuple[MeasuredLoss, ...]:
    """Return the rows that come with the package, read once."""
    return read_losses()


def write_losses(rows: Sequence[MeasuredLoss], path: Path) -> None:
    """Write rows; the file is atomic."""
    text = _File(rows=tuple(rows)).model_dump_json(indent=2) + "\n"
    write_atomic(path, lambda aside: aside.write_text(text))
