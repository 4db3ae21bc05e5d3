"""What both engines follow: the rounds of every step, by a schedule or by a controller.

Around step t an engine calls

    awc                                        atc
    before_update(t)   after the gradient      before_update(t)   after the gradient
    rounds(t + 1)      after the update        rounds(t)          after the update

A controller's observations are sketches, which the engine measures: here for all virtual workers at
once, or on each rank, to be gathered. Under awc the parameters of step t are measured as soon as
they are there, and gathered while step t computes, so the controller sees them when it decides how
those of step t + 1 are mixed. Gradients, where a target needs them, are gathered during the update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol, TypeAlias, final

import numpy as np
import torch

from gossamer.consensus.control import Control, Controller, Decision
from gossamer.consensus.controls import bind, parse_control
from gossamer.consensus.targets import Observation, Plain, State, Target
from gossamer.errors import UserError
from gossamer.topology import Round, Schedule
from gossamer.topology.round import FloatArray

_OBSERVED = [field.name for field in fields(Observation)]

Gathered: TypeAlias = Callable[[], FloatArray]
"""Waits for all workers' sketches, [n, m]."""


class Meter(Protocol):
    """How an engine measures its workers."""

    def begin_parameters(self) -> Gathered:
        """Begin to collect sketches of all workers' parameters."""
        ...

    def begin_gradients(self) -> Gathered:
        """Begin to collect sketches of all workers' gradients."""
        ...

    def lr(self) -> float:
        """Return the learning rate."""
        ...


class Plan(Protocol):
    """The rounds of every step."""

    @property
    def decision(self) -> Decision | None:
        """What a controller decided last."""
        ...

    def before_update(self, step: int) -> None:
        """Look at gradients, and at the parameters that they were taken at."""
        ...

    def rounds(self, step: int) -> tuple[Round, ...]:
        """Return what a step mixes with, in this order; called once per step."""
        ...

    def again(self, step: int) -> tuple[Round, ...]:
        """Return the same once more, after ``load_state_dict`` too."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the plan."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        ...


def planner(
    control: str | Control | Target, schedule: Schedule, order: str, gossip_steps: int
) -> Callable[[Meter], Plan]:
    """Check what an engine is to follow; return the function that makes it, of the engine's meter.

    Args:
        control: a text such as ``"constant(c=0.25)"``, a target or a control.
        schedule: what plain gossip mixes with.
        order: ``"awc"`` or ``"atc"``.
        gossip_steps: how often plain gossip mixes per step; more than once under atc only.
    """
    if order not in ("awc", "atc"):
        raise UserError(f"order must be one of awc, atc, got {order!r}")
    if gossip_steps < 1:
        raise UserError(
            f"gossip_steps must be at least 1, got {gossip_steps}; leave it out to mix once"
        )
    if order == "awc" and gossip_steps > 1:
        raise UserError(
            f"awc mixes once per step, while the gradient is computed, got gossip_steps="
            f"{gossip_steps}; use order='atc', or a denser topology"
        )
    chosen = parse_control(control) if isinstance(control, str) else control
    if isinstance(chosen, Plain):
        return lambda meter: _Scheduled(schedule, gossip_steps)
    if gossip_steps > 1:
        raise UserError(
            f"a control decides how often to mix, got gossip_steps={gossip_steps} beside it; "
            "leave gossip_steps out"
        )
    controller = bind(chosen, schedule, order)
    return lambda meter: _Steered(controller, overlapped=order == "awc", meter=meter)


@final
class _Scheduled:
    """Plain gossip."""

    decision = None

    def __init__(self, schedule: Schedule, gossip_steps: int) -> None:
        self._schedule = schedule
        self._gossip_steps = gossip_steps

    def before_update(self, step: int) -> None:
        pass

    def rounds(self, step: int) -> tuple[Round, ...]:
        return (self._schedule.round(step),) * self._gossip_steps

    again = rounds

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@final
class _Steered:
    """A controller that sees what it needs, when its order has it."""

    def __init__(self, controller: Controller, *, overlapped: bool, meter: Meter) -> None:
        self.decision: Decision | None = None
        self._controller = controller
        self._overlapped = overlapped
        self._meter = meter
        # - What the last decision was made from, to make it again
        self._state = self._state_before = controller.start
        self._seen = Observation(step=0, lr=0.0)
        # - What is being gathered for the next one
        self._sketches: Gathered | None = None
        self._gradients: Gathered | None = None
        self._points: Gathered | None = None

    def before_update(self, step: int) -> None:
        needs = self._controller.needs(step + self._overlapped, self._state)
        self._gradients = self._meter.begin_gradients() if needs.gradients else None
        # Under awc these are the parameters that are mixed, which have been measured.
        apart = needs.points and not self._overlapped
        self._points = self._meter.begin_parameters() if apart else None

    def rounds(self, step: int) -> tuple[Round, ...]:
        if not self._overlapped and self._controller.needs(step, self._state).sketches:
            self._sketches = self._meter.begin_parameters()
        sketches = _waited(self._sketches)
        gradients = _waited(self._gradients)
        self._seen = Observation(
            step=step,
            lr=self._meter.lr(),
            sketches=sketches,
            gradients=gradients,
            points=_waited(self._points) if not self._overlapped else sketches,
        )
        self._state_before = self._state
        self._sketches = self._gradients = self._points = None
        return self.again(step)

    def again(self, step: int) -> tuple[Round, ...]:
        self.decision, self._state = self._controller.decide(self._seen, self._state_before)
        if self._overlapped and self._controller.needs(step + 1, self._state).sketches:
            self._sketches = self._meter.begin_parameters()
        return self.decision.rounds

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"state": self._state_before.to_dict(), "seen": None}
        if self.decision is not None:
            seen = {name: getattr(self._seen, name) for name in _OBSERVED}
            state["seen"] = {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in seen.items()
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = self._state_before = State.from_dict(state["state"])
        if state["seen"] is None:
            return
        num_workers = self._controller.schedule.num_workers
        self._seen = Observation(
            **{name: _loaded(value, num_workers) for name, value in state["seen"].items()}
        )
        self.decision, self._state = self._controller.decide(self._seen, self._state_before)


def _loaded(value: Any, num_workers: int) -> Any:
    """Return a part of an observation; sketches of other workers say nothing about these."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.numpy() if len(value) == num_workers else None


def _waited(gathered: Gathered | None) -> FloatArray | None:
    return None if gathered is None else gathered()
