"""One training run as a value: what is trained, by whom, how they mix."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from gossamer import topology, workloads
from gossamer.consensus import planner
from gossamer.errors import UserError
from gossamer.optim import AccumAdam, AccumAdamW
from gossamer.workloads import Workload

CENTRALIZED = "centralized"
"""In place of a topology: gradients are averaged over all workers, which hold one model."""

MakeOptimizer: TypeAlias = Callable[..., Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "accum_adam": AccumAdam,
    "accum_adamw": AccumAdamW,
}

LR_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    # Consensus control's setting: divided by 10 at 50 % and 75 %.
    "steps": lambda progress: 0.1 ** ((progress >= 0.5) + (progress >= 0.75)),
}
"""Factor of the learning rate, of the share of training that is done."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}


_FROM_RECIPE: Any = Field(default=None)  # never None once made: see RunSpec._take_recipe


class RunSpec(BaseModel):
    """All that decides a run's result; what is not given comes from the workload's recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workload: str
    """A name in ``workloads.WORKLOADS``."""

    workers: int = Field(ge=1)
    topology: str = "one_peer_exponential"
    """As ``topology.parse`` takes it, or ``"centralized"``."""

    engine: Literal["simulated", "distributed"] = "simulated"
    order: Literal["awc", "atc"] = "awc"
    gossip_steps: int = Field(default=1, ge=1)
    control: str = "plain"
    """As ``consensus.parse_control`` takes it."""

    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "float64"] = "float32"
    optimizer: str = _FROM_RECIPE
    """A name in ``OPTIMIZERS``."""

    optimizer_options: dict[str, float | bool | tuple[float, ...]] = _FROM_RECIPE
    """As the optimizer's class takes them."""

    lr: PositiveFloat = _FROM_RECIPE
    lr_schedule: str = _FROM_RECIPE
    """A name in ``LR_SCHEDULES``."""

    batch_size: PositiveInt = _FROM_RECIPE
    """Samples per worker and step."""

    epochs: PositiveInt = _FROM_RECIPE
    steps_per_epoch: PositiveInt = _FROM_RECIPE
    log_every: PositiveInt = 10
    """Steps between two Step records."""

    evaluate_every: PositiveInt = 1
    """Epochs between two Evaluation records; there is one at the end."""

    @model_validator(mode="before")
    @classmethod
    def _take_recipe(cls, given: dict[str, Any]) -> dict[str, Any]:
        recipe = asdict(workloads.find(given.get("workload", "")).recipe)
        other_optimizer = given.get("optimizer", recipe["optimizer"]) != recipe["optimizer"]
        if other_optimizer:  # its options are not the recipe's
            recipe["optimizer_options"] = {}
        return {**recipe, **given}

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        _check_name(OPTIMIZERS, self.optimizer, "optimizer")
        _check_name(LR_SCHEDULES, self.lr_schedule, "lr_schedule")
        try:
            self.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError) as error:
            raise UserError(
                f"optimizer_options must be those of {self.optimizer}, got "
                f"{self.optimizer_options}: {error}"
            ) from error
        if self.topology != CENTRALIZED:
            schedule = topology.parse(self.topology, self.workers)
            planner(self.control, schedule, self.order, self.gossip_steps)
        elif self.control != "plain":
            raise UserError(
                f"centralized training has nothing to control, got {self.control!r}; leave it out"
            )
        return self

    @property
    def id(self) -> str:
        """A short name that differs wherever anything does that decides the result."""
        fields = json.dumps(self.model_dump(), sort_keys=True)
        text = f"{self.make_workload().version} {fields}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.lr * LR_SCHEDULES[self.lr_schedule](step / self.num_steps)

    def make_workload(self) -> Workload:
        """Return what is trained."""
        return workloads.find(self.workload)

    def make_model(self) -> torch.nn.Module:
        """Return the model that every worker starts from; torch's own generator stays as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.make_workload().make_model().to(DTYPES[self.dtype])

    def make_optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """Return the optimizer over these parameters."""
        return OPTIMIZERS[self.optimizer](parameters, lr=self.lr, **self.optimizer_options)


def cast_floats(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return inputs in a run's precision; numbers of tokens stay whole."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _check_name(table: dict[str, Any], name: str, what: str) -> None:
    if name not in table:
        raise UserError(f"{what} must be one of {', '.join(table)}, got {name!r}")
