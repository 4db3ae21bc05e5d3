"""The table of controls, and the one place where a text becomes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gossamer import calls
from gossamer.calls import Call, Name
from gossamer.consensus.actions import AdaConsensus, Gamma, Repeat
from gossamer.consensus.control import Control, Controller
from gossamer.consensus.targets import (
    Adaptive,
    Constant,
    CriticalTarget,
    Exact,
    Phases,
    Plain,
    Target,
)
from gossamer.errors import UserError, nearest, nearest_in_brackets
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


# A new control is one class and one row here.
CONTROLS: dict[str, Callable[..., Control | Target]] = {
    # - Targets; repeat under atc, ada_consensus under awc
    "plain": Plain,
    "exact": Exact,
    "constant": Constant,
    "adaptive": Adaptive,
    "critical": CriticalTarget,
    "phases": phases,
    "auto": auto,
    # - Ways to act
    "repeat": Repeat,
    "ada_consensus": AdaConsensus,
    "gamma": Gamma,
}


def parse_control(text: str) -> Control | Target:
    """Return the control that a text names; arguments may be controls themselves.

    >>> parse_control("repeat(phases(constant(c=0.25), plain), q_max=16)")
    Repeat(target=Phases(targets=(Constant(c=0.25), Plain()), at=()), q_max=16, interval=1)
    """
    try:
        call = calls.read(text)
    except ValueError:
        raise UserError(
            "a control is a name or name(argument=value, ...), each argument once, got "
            f"{text[:80]!r}; for instance constant(c=0.25) or ada_consensus(auto)"
        ) from None
    return _build(call)


_ACTIONS: dict[str, Callable[[Target], Control]] = {"awc": AdaConsensus, "atc": Repeat}


def check_order(order: str) -> None:
    """Refuse what is not an order."""
    if order not in _ACTIONS:
        raise UserError(
            f"order must be one of {', '.join(_ACTIONS)}, got {order!r}; {nearest(order, _ACTIONS)}"
        )


def bind(control: Control | Target, schedule: Schedule, order: str) -> Controller:
    """Return the controller of a control or a target, on a schedule, under an order.

    A target by itself acts by ``Repeat`` under atc and by ``AdaConsensus`` under awc.
    """
    check_order(order)
    acting = control if isinstance(control, Control) else _ACTIONS[order](control)
    return acting.bind(schedule, order)


def _build(call: Call) -> Control | Target:
    build = CONTROLS.get(call.name)
    if build is None:
        raise UserError(
            f"unknown control {call.name!r}{nearest_in_brackets(call.name, CONTROLS)}; "
            f"choose from {', '.join(CONTROLS)}"
        )
    positional = [_value(value) for value in call.positional]
    named = {key: _value(value) for key, value in call.named.items()}
    signature = inspect.signature(build)
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values())) or "no arguments"
        raise UserError(
            f"{call.name} takes {takes}, got {str(call)!r}: {error}; give these"
        ) from None
    return build(*bound.args, **bound.kwargs)


def _value(value: Any) -> Any:
    """Return a control, a number, a tuple of numbers, or a bare word as a string."""
    if isinstance(value, Call):
        return _build(value)
    if isinstance(value, Name):
        return _build(Call(value)) if value in CONTROLS else str(value)
    return value
