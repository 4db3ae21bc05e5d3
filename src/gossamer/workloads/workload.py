"""The parts of a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn


@final
@dataclass(frozen=True, slots=True)
class Data:
    """Samples along the first dimension."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a workload is trained unless a run says otherwise."""

    optimizer: str
    """A name in ``engine.OPTIMIZERS``."""

    optimizer_options: dict[str, float | bool | tuple[float, ...]]
    lr: float
    lr_schedule: str
    """A name in ``engine.LR_SCHEDULES``."""

    batch_size: int
    """Samples per worker and step."""

    epochs: int
    steps_per_epoch: int
    """The same for any number of workers: runs at different scales take equally many steps."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything about a training task but how it is distributed."""

    name: str
    version: int
    """Raised when results of before cannot be compared with those of after."""

    make_model: Callable[[], nn.Module]
    """Draws initial parameters from torch's generator, which the caller has seeded."""

    load: Callable[[], Data]
    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean over a batch, of outputs and targets."""

    metric_name: str
    metric: Callable[[Tensor, Tensor], float]
    """What an evaluation reports, of outputs and targets of the test data."""

    recipe: Recipe
