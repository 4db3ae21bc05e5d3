"""The parts that a specification names: the engine's own tables, and the registry of each field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from gossamer.algorithms import ALGORITHM_REGISTRY, name_of
from gossamer.consensus.catalogue import CONTROL_REGISTRY
from gossamer.errors import UserError
from gossamer.optim import AccumAdam, AccumAdamW, SmoothAdam, SmoothAdamW
from gossamer.registry import Registry, absolute
from gossamer.registry.calls import Call
from gossamer.topology.catalogue import TOPOLOGY_REGISTRY
from gossamer.wire import WIRE_REGISTRY
from gossamer.workloads import SHARDING_REGISTRY, WORKLOAD_REGISTRY

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "accum_adam": AccumAdam,
    "accum_adamw": AccumAdamW,
    "smooth_adam": SmoothAdam,
    "smooth_adamw": SmoothAdamW,
}

OPTIMIZER_VERSIONS = {"accum_adam": 2, "accum_adamw": 2}
"""Versions of optimizers whose update has changed; part of a run's id, so that old records are not
mistaken for new ones."""

LR_SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "constant": lambda done, warmups: 1.0,
    "cosine": lambda done, warmups: (1 + math.cos(math.pi * done)) / 2,
    # Consensus control's setting: divided by 10 at 50 % and 75 %.
    "steps": lambda done, warmups: 0.1 ** ((done >= 0.5) + (done >= 0.75)),
    "inverse_sqrt": lambda done, warmups: max(1.0, warmups) ** -0.5,
}
"""Factor of the learning rate: a function of the fraction of training that is done, and of the
steps taken in units of the warm-up."""

LR_SCALINGS: dict[str, Callable[[float], float]] = {
    "none": lambda s: 1.0,
    "linear": lambda s: s,
    "sqrt": math.sqrt,
}
"""Factor of the learning rate: a function of s = batch size x averaging neighbourhood / reference
batch."""

OPTIMIZER_REGISTRY: Registry[Optimizer] = Registry(
    kind="optimizer",
    table=OPTIMIZERS,
    group="gossamer.optimizers",
    example="sgd or sgd(momentum=0.9)",
    makes=(Optimizer,),
    given=1,
    reserved=("lr",),
)
"""Functions of parameters and a learning rate, ``lr``."""

LR_SCHEDULE_REGISTRY: Registry[float] = Registry(
    kind="lr_schedule",
    table=LR_SCHEDULES,
    group="gossamer.lr_schedules",
    example="cosine",
    makes=(float, int),
    given=2,
)
LR_SCALING_REGISTRY: Registry[float] = Registry(
    kind="lr_scaling",
    table=LR_SCALINGS,
    group="gossamer.lr_scalings",
    example="linear",
    makes=(float, int),
    given=1,
)

REGISTRIES: dict[str, Registry[Any]] = {
    "workload": WORKLOAD_REGISTRY,
    "topology": TOPOLOGY_REGISTRY,
    "algorithm": ALGORITHM_REGISTRY,
    "control": CONTROL_REGISTRY,
    "wire": WIRE_REGISTRY,
    "optimizer": OPTIMIZER_REGISTRY,
    "sharding": SHARDING_REGISTRY,
    "lr_schedule": LR_SCHEDULE_REGISTRY,
    "lr_scaling": LR_SCALING_REGISTRY,
}
"""The registry of each field that names a part."""


def with_absolute_paths(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return fields of a run with the paths of plug-ins made absolute.

    Args:
        fields: of a run.
        folder: from which paths are given.
    """
    texts = {name: fields[name] for name in REGISTRIES if isinstance(fields.get(name), str)}
    return {**fields, **{name: absolute(text, folder) for name, text in texts.items()}}


def with_algorithm(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a run with ``order`` replaced by the algorithm that it names."""
    fields = dict(given)
    order = fields.pop("order", "")
    if order:
        fields["algorithm"] = name_of(fields.get("algorithm", ""), order)
    return fields


def split_optimizer(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer without arguments, and all its options.

    Args:
        recipe: of the workload; its options are for its own optimizer.
        given: fields of a run, in which the string of the optimizer may have arguments.
    """
    if not isinstance(given.get("optimizer", ""), str):
        return {}
    usual = OPTIMIZER_REGISTRY.parse(recipe["optimizer"])
    part = OPTIMIZER_REGISTRY.parse(given.get("optimizer", usual.call.name))
    options = usual.arguments | recipe["optimizer_options"]
    if part.call.name != usual.call.name or part.arguments:
        options = {}
    options = given.get("optimizer_options", options)
    if not isinstance(options, dict):
        return {"optimizer_options": options}  # the field refuses it
    if twice := part.arguments.keys() & options.keys():
        raise UserError(
            f"an option must be given in one place, got {', '.join(sorted(twice))} in optimizer "
            f"{given['optimizer']!r} and in optimizer_options; remove one of them"
        )
    listed = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in {**part.arguments, **options}.items()
    }
    return {"optimizer": str(Call(part.call.name)), "optimizer_options": listed}
