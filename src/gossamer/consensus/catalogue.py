"""Targets and policies by name, and the default policy of a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gossamer.consensus.controller import Controller, Policy
from gossamer.consensus.policies import AdaConsensus, Gamma, LocalSteps, Repeat
from gossamer.consensus.targets import (
    Adaptive,
    Constant,
    CriticalTarget,
    Exact,
    Phases,
    Plain,
    Target,
)
from gossamer.registry import Registry
from gossamer.topology import Schedule


def phases(*targets: Target, at: tuple[int, ...] = ()) -> Phases:
    """A target for each phase of training."""
    return Phases(targets, at)


def auto() -> Phases:
    """A quarter of Ξ_max until the learning rate first falls to half or less, then plain gossip.

    Kong et al.'s guidance: what a first phase loses by distance is not regained, while a distance
    in later phases costs nothing or helps (https://arxiv.org/abs/2102.04828). Where the rate decays
    smoothly there is one phase.
    """
    return Phases((Constant(c=0.25), Plain()))


# A new target or policy is one class and one row here.
TARGETS: dict[str, Callable[..., Target]] = {
    "plain": Plain,
    "exact": Exact,
    "constant": Constant,
    "adaptive": Adaptive,
    "critical": CriticalTarget,
    "phases": phases,
    "auto": auto,
}
POLICIES: dict[str, Callable[..., Policy]] = {
    "repeat": Repeat,
    "ada_consensus": AdaConsensus,
    "local_steps": LocalSteps,
    "gamma": Gamma,
}
CONTROLS: dict[str, Callable[..., Policy | Target]] = {**TARGETS, **POLICIES}
"""What ``control=`` takes."""

_EXAMPLES = {
    "constant": "constant(c=0.25)",
    "adaptive": "adaptive(s=0.3)",
    "phases": "phases(constant(c=0.25), plain)",
    "repeat": "repeat(constant(c=0.25))",
    "ada_consensus": "ada_consensus(auto)",
    "local_steps": "local_steps(constant(c=1))",
}
_GROUP = "gossamer.controls"

_targets: Registry[Target] = Registry(
    kind="target",
    table=TARGETS,
    group=_GROUP,
    example="constant(c=0.25)",
    example_of=lambda name: _EXAMPLES.get(name, ""),
    makes=(Target,),
    stands_for=(Target,),
)
CONTROL_REGISTRY: Registry[Policy | Target] = Registry(
    kind="control",
    table=CONTROLS,
    group=_GROUP,
    example="constant(c=0.25) or ada_consensus(auto)",
    example_of=lambda name: _EXAMPLES.get(name, ""),
    makes=(Policy, Target),
    stands_for=(Policy,),
)


def parse_control(text: str) -> Policy | Target:
    """Return the control that a string names; arguments may be controls themselves.

    >>> parse_control("repeat(phases(constant(c=0.25), plain), q_max=16)")
    Repeat(target=Phases(targets=(Constant(c=0.25), Plain()), at=()), q_max=16, interval=1)
    """
    return CONTROL_REGISTRY.parse(text).make()


_DEFAULTS: dict[str, Callable[[Target], Policy]] = {"awc": AdaConsensus, "atc": Repeat}


def bind(control: Policy | Target, schedule: Schedule, order: str) -> Controller[Any]:
    """Return the controller of a policy or a target, on a schedule, under an order.

    The default policy of a target is ``Repeat`` under atc and ``AdaConsensus`` under awc.
    """
    policy = control if isinstance(control, Policy) else _DEFAULTS[order](control)
    return policy.bind(schedule, order)
