"""One training run as an immutable value: the workload, the workers, and how they mix."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)
from torch import Tensor
from torch.optim import Optimizer

from gossamer import topology, workloads
from gossamer.algorithms import Algorithm, parse_algorithm
from gossamer.algorithms.catalogue import ORDERS
from gossamer.consensus import chooses_rounds, make_round_source
from gossamer.engine.parts import (
    LR_SCALING_REGISTRY,
    LR_SCHEDULE_REGISTRY,
    OPTIMIZER_REGISTRY,
    OPTIMIZER_VERSIONS,
    REGISTRIES,
    split_optimizer,
    with_absolute_paths,
    with_algorithm,
)
from gossamer.errors import ImpossibleError, UserError
from gossamer.optim import DiLoCo
from gossamer.records import WorkloadFacts
from gossamer.registry import Part, PlugInError
from gossamer.topology import Schedule
from gossamer.topology.graphs import MAX_WORKERS
from gossamer.topology.schedules import MAX_EVERY, MAX_FRAGMENTS
from gossamer.wire import parse_wire
from gossamer.workloads import Data, Workload

CENTRALIZED = "centralized"
"""Instead of a topology: gradients are averaged over all workers, which share one model."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}

Count: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]

_LATER_FIELDS = {
    "every": 1,
    "validation_share": 0.0,
    "clip_norm": 0.0,
    "wire": "fp32",
    "fragments": 1,
}
"""Later fields with the value that earlier runs had: with it they are not part of the id."""

_FROM_RECIPE: Any = Field(default=None)  # never None once made: see RunSpec._take_recipe


class RunSpec(BaseModel):
    """All that decides a run's result; fields not given come from the workload's recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    workload: str
    """A name in ``workloads.WORKLOADS``, or a plug-in; as all fields that name a part."""

    workers: int = Field(ge=1, le=MAX_WORKERS)
    topology: str = "one_peer_exponential"
    """As ``topology.parse`` takes it, or ``"centralized"``."""

    method: str = ""
    """The method's name in reports; not part of the id."""

    engine: Literal["simulated", "distributed"] = "simulated"
    algorithm: str = "awc"
    """A name in ``algorithms.ALGORITHMS``; ``order`` is another spelling of awc and atc."""

    every: int = Field(default=1, ge=1, le=MAX_EVERY)
    """Steps from one exchange to the next."""

    gossip_steps: int = Field(default=1, ge=1, le=1000)
    control: str = "plain"
    """A name in ``consensus.catalogue.CONTROLS``, with arguments."""

    wire: str = "fp32"
    """The wire format of parameters: a name in ``wire.WIRES``, with arguments."""

    fragments: int = Field(default=1, ge=1, le=MAX_FRAGMENTS)
    """Into how many the parameters are split; exchanges send them in turn."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    dtype: Literal["float32", "float64"] = "float32"
    optimizer: str = _FROM_RECIPE
    """A name in ``OPTIMIZERS``; arguments of ``"sgd(momentum=0.9)"`` become optimizer_options."""

    optimizer_options: dict[str, int | float | bool | str | tuple[float, ...]] = _FROM_RECIPE
    """As the optimizer's class takes them."""

    outer_lr: PositiveFloat | None = None
    """DiLoCo: the rate of the outer step that follows each average of all workers."""

    outer_momentum: float = Field(default=0.9, ge=0, lt=1)

    lr: PositiveFloat = _FROM_RECIPE
    lr_schedule: str = _FROM_RECIPE
    """A name in ``LR_SCHEDULES``."""

    lr_scaling: str = _FROM_RECIPE
    """A name in ``LR_SCALINGS``: how the rate follows the averaging neighbourhood, which is all
    workers in centralized training, and a worker and its neighbours otherwise."""

    lr_follows_graph: bool = False
    """Whether ``lr_scaling`` uses the neighbourhood of each step instead of the first; for local
    steps, that of the next exchange."""

    clip_norm: NonNegativeFloat = 0.0
    """The largest norm of a gradient: of each worker's own, or of the mean in centralized training;
    0 clips nothing."""

    reference_batch: Count = _FROM_RECIPE
    warmup_epochs: NonNegativeFloat = _FROM_RECIPE
    batch_size: Count = _FROM_RECIPE
    """Samples per worker and step."""

    sharding: str = _FROM_RECIPE
    """As ``workloads.parse_sharding`` takes it."""

    epochs: Count = _FROM_RECIPE
    steps_per_epoch: Count = _FROM_RECIPE
    max_steps: Count | None = None
    """End early after this many steps."""

    max_bytes: PositiveFloat | None = None
    """End early when workers have sent this much on average; on processes that includes the padding
    of buckets, about 1 % for the smallest models."""

    max_train_s: PositiveFloat | None = None
    """End early when training steps have taken this long."""

    log_every: Count = 25
    """Steps between two Step records. They cost up to half of a step of the smallest model, so 25
    cost 2 % there, and less elsewhere (``benchmarks.records``)."""

    evaluate_every: Count = 1
    """Epochs between two Evaluation records; there is one at the end."""

    evaluate_replicas: int = Field(default=8, ge=0, le=MAX_WORKERS)
    """How many workers' own models are evaluated."""

    evaluate_samples: Annotated[int, Field(ge=0, le=10**9)] = _FROM_RECIPE
    """Test samples of an evaluation during training, the same in all runs; 0 for all of them. The
    last evaluation uses all."""

    validation_share: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the training samples held out and evaluated on instead of the test samples, which
    such a run never uses; 0 for none. The number of steps does not change."""

    @model_validator(mode="before")
    @classmethod
    def _take_recipe(cls, given: dict[str, Any]) -> dict[str, Any]:
        # Values of other types are passed on: validation of the fields raises on them.
        if not isinstance(given.get("workload", ""), str):
            return given
        workload = workloads.find(given.get("workload", ""))
        recipe = asdict(workload.recipe)
        given = with_algorithm(given)
        full = {**recipe, **given, **split_optimizer(recipe, given)}
        full = with_absolute_paths(full, Path.cwd())
        workers, batch_size = full.get("workers"), full["batch_size"]
        if full["steps_per_epoch"] is None and type(workers) is type(batch_size) is int:
            per_step = max(1, workers * batch_size)
            full["steps_per_epoch"] = max(1, workload.num_train // per_step)
        return full

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        for part in self.parts.values():
            if not part.kind.given:
                part.make()
        try:
            self.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
        except PlugInError:
            raise
        except (TypeError, ValueError) as error:
            raise UserError(
                f"optimizer_options must be those of {self.optimizer}, got "
                f"{self.optimizer_options}: {error}"
            ) from error
        try:
            self._check_together()
            self.lr_at(0)
        except PlugInError:
            raise
        except UserError as error:
            raise ImpossibleError(str(error)) from error
        return self

    def _check_together(self) -> None:
        if self.topology != CENTRALIZED:
            algorithm = self.make_algorithm()
            make_round_source(
                self.control,
                self.schedule,
                algorithm,
                self.gossip_steps,
                self.every,
                self.fragments,
            )
            algorithm.check_optimizers([self.make_optimizer([torch.nn.Parameter(torch.zeros(1))])])
            parse_wire(self.wire).check(
                algorithm,
                algorithm.adapt(self.base_schedule),
                rounds_are_chosen=chooses_rounds(self.control),
            )
        elif given := self._not_centralized:
            raise UserError(
                "centralized training all-reduces full gradients at every step, so it takes no "
                f"option of gossip, got {given}; leave it out"
            )
        averages = self.topology == "complete" and self.algorithm == "atc"
        if self.outer_lr is not None and not averages:
            raise UserError(
                f"an outer step follows averages of all workers under atc, got {self.topology} "
                f"under {self.algorithm}; use topology 'complete', algorithm 'atc' and every=16"
            )

    @property
    def _not_centralized(self) -> dict[str, Any]:
        """The options of gossip that differ from their defaults."""
        default = {"control": "plain", "every": 1, "wire": "fp32", "fragments": 1}
        own = {name: getattr(self, name) for name in (*default, "algorithm")}
        return {
            name: value
            for name, value in own.items()
            if value != default.get(name, value if value in ORDERS else "")
        }

    @property
    def id(self) -> str:
        """A short hash of everything that decides the result.

        Two simulated runs with the same id are bit-identical on the same kind of machine, versions
        and number of threads, as no timing decides what is computed. Except that a time limit does
        (``max_train_s``), and too little memory may.
        """
        fields = self.model_dump(exclude={"method"})
        if self.algorithm in ORDERS:
            fields["order"] = fields.pop("algorithm")  # keeps ids from before there were others
            if self.topology == "complete" and self.every > 1:
                fields["topology"] = f"local_sgd(every={fields.pop('every')})"
        if self.evaluate_samples == self.make_workload().recipe.evaluate_samples:
            del fields["evaluate_samples"]  # keeps ids from before it was a field
        for name, default in _LATER_FIELDS.items():  # as well
            if fields.get(name) == default:
                del fields[name]
        if self.optimizer in OPTIMIZER_VERSIONS:
            fields["optimizer_version"] = OPTIMIZER_VERSIONS[self.optimizer]
        fields["optimizer_options"] = {  # 1 and 1.0 are the same setting
            name: float(value) if type(value) is int else value
            for name, value in self.optimizer_options.items()
        }
        for name, part in self.parts.items():
            if part.plugins:  # independent of their paths
                fields[name] = part.identity
        text = f"{self.make_workload().version} {json.dumps(fields, sort_keys=True)}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def parts(self) -> dict[str, Part[Any]]:
        """The parts that its fields name, by field."""
        return {
            field: _look_up(field, getattr(self, field), self.steps_per_epoch)
            for field in REGISTRIES
            if getattr(self, field) != CENTRALIZED
        }

    @property
    def sources(self) -> dict[str, str]:
        """Digests and versions of the plug-ins that it names, for its records."""
        plugins = [plugin for part in self.parts.values() for plugin in part.plugins.values()]
        return {f"plug-in {plugin.label}": plugin.source for plugin in plugins}

    @property
    def num_steps(self) -> int:
        """Steps of the run, if no budget ends it early."""
        return min(self.epochs * self.steps_per_epoch, self.max_steps or sys.maxsize)

    @property
    def base_schedule(self) -> Schedule:
        """The rounds of the topology, before an algorithm spreads or changes them."""
        return make_schedule(self.topology, self.workers, self.steps_per_epoch)

    @property
    def schedule(self) -> Schedule:
        """The rounds of a decentralized run, step by step."""
        return adapted_schedule(
            self.algorithm,
            self.topology,
            self.workers,
            self.steps_per_epoch,
            self.every,
            self.fragments,
        )

    def make_algorithm(self) -> Algorithm:
        """Return what a step does with rounds."""
        return parse_algorithm(self.algorithm)

    def lr_at(self, step: int, done: float | None = None) -> float:
        """Return the learning rate of a step.

        Args:
            step: from 0.
            done: the fraction of training that is done, where a budget may end it early.
        """
        done = step / self.num_steps if done is None else done
        warmups = (step + 1) / max(1.0, self.warmup_epochs * self.steps_per_epoch)
        factor = _lr_schedule(self.lr_schedule)(done, warmups)
        return self.lr * self._scaling(step) * min(1.0, warmups) * factor

    def _scaling(self, step: int) -> float:
        if self.lr_scaling == "none":
            return 1.0
        neighbourhood: float = self.workers
        if self.topology != CENTRALIZED:
            # For a local step, that of the next exchange.
            at = (step if self.lr_follows_graph else 0) // self.every * self.every
            round = self.schedule.round(at + self.every - 1)
            neighbourhood = 1 + float(round.in_degrees.mean())
        scale = self.batch_size * neighbourhood / self.reference_batch
        return LR_SCALING_REGISTRY.parse(self.lr_scaling).make(scale)

    def make_workload(self) -> Workload:
        """Return the workload."""
        return workloads.find(self.workload)

    def load_data(self) -> Data:
        """Return the training and test data."""
        data = self.make_workload().load()
        return data.with_validation(self.validation_share) if self.validation_share else data

    @property
    def workload_facts(self) -> WorkloadFacts:
        """Facts of the workload for its records."""
        return facts_of(self.make_workload())

    def make_model(self) -> torch.nn.Module:
        """Return the model that every worker starts from; torch's global generator is restored."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.make_workload().make_model().to(DTYPES[self.dtype])

    def make_optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """Return the optimizer over these parameters."""
        part = OPTIMIZER_REGISTRY.parse(self.optimizer)
        return part.make(parameters, lr=self.lr, **self.optimizer_options)

    def make_outer(self, parameters: Iterable[Tensor]) -> DiLoCo | None:
        """Return the outer optimizer, where there is one."""
        if self.outer_lr is None:
            return None
        return DiLoCo(parameters, self.every, self.outer_lr, self.outer_momentum)


def facts_of(workload: Workload) -> WorkloadFacts:
    """Return what an analysis needs of a workload."""
    return WorkloadFacts(
        metric_name=workload.metric_name,
        higher_is_better=workload.higher_is_better,
        target=workload.target,
        evaluate_samples=workload.recipe.evaluate_samples,
    )


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give an optimizer the learning rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def trained_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that are trained."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def trained_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the parameters that are trained."""
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


@lru_cache(maxsize=1024)
def _look_up(field: str, text: str, steps_per_epoch: int) -> Part[Any]:
    """Return the part that a field names; cached, because every id needs it."""
    defaults = {"steps_per_epoch": steps_per_epoch} if field == "topology" else None
    return REGISTRIES[field].parse(text, defaults)


@lru_cache(maxsize=256)
def adapted_schedule(
    algorithm: str,
    topology: str,
    workers: int,
    steps_per_epoch: int,
    every: int,
    fragments: int = 1,
) -> Schedule:
    """Return the rounds that an algorithm makes of a topology's, step by step."""
    return parse_algorithm(algorithm).adapt(
        make_schedule(topology, workers, steps_per_epoch), every, fragments
    )


@lru_cache(maxsize=256)
def make_schedule(text: str, workers: int, steps_per_epoch: int) -> Schedule:
    """Return the schedule that a run's topology names; cached, because every step needs it."""
    return topology.parse(text, workers, steps_per_epoch=steps_per_epoch)


@lru_cache(maxsize=256)
def _lr_schedule(text: str) -> Callable[[float, float], float]:
    return LR_SCHEDULE_REGISTRY.parse(text).make
