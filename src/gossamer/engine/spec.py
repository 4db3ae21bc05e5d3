"""One training run as a value: what is trained, by whom, how they mix."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from gossamer import calls, topology, workloads
from gossamer.consensus import parse_control, planner
from gossamer.errors import ImpossibleError, UserError, nearest
from gossamer.optim import AccumAdam, AccumAdamW, DiLoCo
from gossamer.topology import Schedule
from gossamer.workloads import Workload, parse_sharding

CENTRALIZED = "centralized"
"""In place of a topology: gradients are averaged over all workers, which hold one model."""

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "accum_adam": AccumAdam,
    "accum_adamw": AccumAdamW,
}

LR_SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "constant": lambda done, warmups: 1.0,
    "cosine": lambda done, warmups: (1 + math.cos(math.pi * done)) / 2,
    # Consensus control's setting: divided by 10 at 50 % and 75 %.
    "steps": lambda done, warmups: 0.1 ** ((done >= 0.5) + (done >= 0.75)),
    "inverse_sqrt": lambda done, warmups: max(1.0, warmups) ** -0.5,
}
"""Factor of the learning rate, of the share of training that is done, and of the steps that are,
in lengths of the warm-up."""

LR_SCALINGS: dict[str, Callable[[float], float]] = {
    "none": lambda s: 1.0,
    "linear": lambda s: s,
    "sqrt": math.sqrt,
}
"""Factor of the learning rate, of s = batch size x averaging neighbourhood / reference batch."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}

_FROM_RECIPE: Any = Field(default=None)  # never None once made: see RunSpec._take_recipe


class RunSpec(BaseModel):
    """All that decides a run's result; what is not given comes from the workload's recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    workload: str
    """A name in ``workloads.WORKLOADS``."""

    workers: int = Field(ge=1)
    topology: str = "one_peer_exponential"
    """As ``topology.parse`` takes it, or ``"centralized"``."""

    method: str = ""
    """What reports call how it is distributed; no part of the id."""

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

    outer_lr: PositiveFloat | None = None
    """DiLoCo: the rate of the outer step that follows each average of ``local_sgd``."""

    outer_momentum: float = Field(default=0.9, ge=0, lt=1)

    lr: PositiveFloat = _FROM_RECIPE
    lr_schedule: str = _FROM_RECIPE
    """A name in ``LR_SCHEDULES``."""

    lr_scaling: str = _FROM_RECIPE
    """A name in ``LR_SCALINGS``: how the rate follows the averaging neighbourhood, which is all
    workers in centralized training, and a worker and its neighbours otherwise."""

    lr_follows_graph: bool = False
    """Whether ``lr_scaling`` uses the neighbourhood at each step, in place of the first step's.
    For local SGD that is all workers, always."""

    reference_batch: PositiveInt = _FROM_RECIPE
    warmup_epochs: NonNegativeFloat = _FROM_RECIPE
    batch_size: PositiveInt = _FROM_RECIPE
    """Samples per worker and step."""

    sharding: str = _FROM_RECIPE
    """As ``workloads.parse_sharding`` takes it."""

    epochs: PositiveInt = _FROM_RECIPE
    steps_per_epoch: PositiveInt = _FROM_RECIPE
    max_steps: PositiveInt | None = None
    """End early after so many steps."""

    max_bytes: PositiveFloat | None = None
    """End early when the average worker has sent so much; on processes that includes the padding
    between tensors, about 1 % for the smallest models."""

    max_train_s: PositiveFloat | None = None
    """End early when steps have taken so long."""

    log_every: PositiveInt = 25
    """Steps between two Step records. They cost up to half of a step of the smallest model, so 25
    cost 2 % there, and less elsewhere (``benchmarks.records``)."""

    evaluate_every: PositiveInt = 1
    """Epochs between two Evaluation records; there is one at the end."""

    evaluate_replicas: int = Field(default=8, ge=0)
    """How many workers' own models are evaluated."""

    @model_validator(mode="before")
    @classmethod
    def _take_recipe(cls, given: dict[str, Any]) -> dict[str, Any]:
        # What is of another type is left as it is: the fields refuse it.
        if not isinstance(given.get("workload", ""), str):
            return given
        workload = workloads.find(given.get("workload", ""))
        recipe = asdict(workload.recipe)
        other_optimizer = given.get("optimizer", recipe["optimizer"]) != recipe["optimizer"]
        if other_optimizer:  # its options are not the recipe's
            recipe["optimizer_options"] = {}
        full = {**recipe, **given}
        if isinstance(full["optimizer_options"], dict):
            full["optimizer_options"] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in full["optimizer_options"].items()
            }
        if full["steps_per_epoch"] is None:
            with contextlib.suppress(TypeError, KeyError):
                per_step = full["workers"] * full["batch_size"]
                full["steps_per_epoch"] = max(1, workload.num_train // max(1, per_step))
        return full

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        _check_name(OPTIMIZERS, self.optimizer, "optimizer")
        _check_name(LR_SCHEDULES, self.lr_schedule, "lr_schedule")
        _check_name(LR_SCALINGS, self.lr_scaling, "lr_scaling")
        parse_sharding(self.sharding)
        try:
            self.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError) as error:
            raise UserError(
                f"optimizer_options must be those of {self.optimizer}, got "
                f"{self.optimizer_options}: {error}"
            ) from error
        parse_control(self.control)
        try:
            self._check_together()
        except UserError as error:
            raise ImpossibleError(str(error)) from error
        return self

    def _check_together(self) -> None:
        if self.topology != CENTRALIZED:
            planner(self.control, self.schedule, self.order, self.gossip_steps)
        elif self.control != "plain":
            raise UserError(
                f"centralized training has nothing to control, got {self.control!r}; leave it out"
            )
        if self.outer_lr is not None and (self.local_steps is None or self.order != "atc"):
            raise UserError(
                f"an outer step follows the averages of local_sgd under atc, got {self.topology} "
                f"under {self.order}; use topology 'local_sgd(every=16)' and order 'atc'"
            )

    @property
    def id(self) -> str:
        """A short name that differs wherever anything does that decides the result.

        Two runs of one id agree to rounding and not to the bit: a simulation times how many workers
        it computes at once, and takes what is fastest on that machine.
        """
        fields = json.dumps(self.model_dump(exclude={"method"}), sort_keys=True)
        text = f"{self.make_workload().version} {fields}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return min(self.epochs * self.steps_per_epoch, self.max_steps or sys.maxsize)

    @property
    def schedule(self) -> Schedule:
        """The rounds of a decentralized run."""
        return make_schedule(self.topology, self.workers, self.steps_per_epoch)

    @property
    def local_steps(self) -> int | None:
        """Steps between two averages of local SGD; None for other topologies."""
        if self.topology == CENTRALIZED or calls.read(self.topology).name != "local_sgd":
            return None
        return self.schedule.period

    def lr_at(self, step: int, done: float | None = None) -> float:
        """Return the learning rate of a step.

        Args:
            step: from 0.
            done: the share of training that is behind it, where a budget may end it early.
        """
        done = step / self.num_steps if done is None else done
        warmups = (step + 1) / max(1.0, self.warmup_epochs * self.steps_per_epoch)
        factor = LR_SCHEDULES[self.lr_schedule](done, warmups)
        return self.lr * self._scaling(step) * min(1.0, warmups) * factor

    def _scaling(self, step: int) -> float:
        if self.lr_scaling == "none":
            return 1.0
        neighbourhood: float = self.workers
        if self.topology != CENTRALIZED and self.local_steps is None:
            round = self.schedule.round(step if self.lr_follows_graph else 0)
            neighbourhood = 1 + float(round.in_degrees.mean())
        return LR_SCALINGS[self.lr_scaling](self.batch_size * neighbourhood / self.reference_batch)

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

    def make_outer(self, parameters: Iterable[Tensor]) -> DiLoCo | None:
        """Return the outer optimizer, where there is one."""
        if self.outer_lr is None or self.local_steps is None:
            return None
        return DiLoCo(parameters, self.local_steps, self.outer_lr, self.outer_momentum)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give an optimizer the learning rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def trained_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that are trained."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@lru_cache(maxsize=256)
def make_schedule(text: str, workers: int, steps_per_epoch: int) -> Schedule:
    """Return the rounds that a run's topology names; kept, because a run asks at every step."""
    return topology.parse(text, workers, steps_per_epoch=steps_per_epoch)


def _check_name(table: dict[str, Any], name: str, what: str) -> None:
    if name not in table:
        raise UserError(
            f"{what} must be one of {', '.join(table)}, got {name!r}; {nearest(name, table)}"
        )
