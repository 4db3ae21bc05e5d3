"""What gives an engine the rounds of every step: a schedule, or a controller.

Around step t an engine calls

    awc                                        atc
    before_update(t)   after the gradient      before_update(t)   after the gradient
    rounds(t + 1)      after the update        rounds(t)          after the update

A controller's observations are sketches, which the engine measures: for all virtual workers at
once, or on each rank, followed by an all-gather. Under awc the parameters of step t are measured as
soon as they exist, and the all-gather overlaps with step t, so the controller has them when it
decides how those of step t + 1 are mixed. Gradients, where a target needs them, are gathered during
the update.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol, TypeAlias, cast, final

import numpy as np
import torch

from gossamer.algorithms import Algorithm
from gossamer.consensus.catalogue import bind, parse_control
from gossamer.consensus.controller import Controller, Decision, Policy
from gossamer.consensus.observation import Observation
from gossamer.consensus.state_data import digest_of_data
from gossamer.consensus.targets import Plain, Target
from gossamer.errors import UserError
from gossamer.registry import PlugInError
from gossamer.topology import Round, Schedule
from gossamer.topology.arrays import FloatArray

_log = logging.getLogger(__name__)

_OBSERVED = [field.name for field in fields(Observation)]

Gathered: TypeAlias = Callable[[], FloatArray]
"""Waits for all workers' sketches, [n, m]."""


class Meter(Protocol):
    """How an engine measures its workers; each ``begin`` returns a function that waits."""

    def begin_parameters(self) -> Gathered:
        """Begin to collect sketches of all workers' parameters."""
        ...

    def begin_gradients(self) -> Gathered:
        """Begin to collect sketches of all workers' gradients."""
        ...

    def begin_lr(self, about: str) -> Callable[[], float]:
        """Begin to agree on the learning rate; return the function that waits for it.

        Args:
            about: compared across ranks; must be equal on all of them before they decide.
        """
        ...


class RoundSource(Protocol):
    """Gives an engine the rounds of every step."""

    @property
    def decision(self) -> Decision | None:
        """The controller's last decision."""
        ...

    def before_update(self, step: int) -> None:
        """Measure gradients, and the parameters that they were taken at."""
        ...

    def rounds(self, step: int) -> tuple[Round, ...]:
        """Return what a step mixes with, in this order; called once per step."""
        ...

    def resume(self, step: int) -> tuple[Round, ...]:
        """Return what ``rounds`` returned, after a state was loaded or parameters were changed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the rounds."""
        ...

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue from a state at a step; from the start, where another source wrote it.

        A collective call where a controller decides.
        """
        ...


def name_of(control: str | Policy | Target) -> str:
    """Return a string that identifies a control, equal for equal settings.

    >>> name_of("constant(c=0.5)")
    'Constant(c=0.5)'
    """
    chosen = parse_control(control) if isinstance(control, str) else control
    return re.sub(r" at 0x[0-9a-f]+", "", repr(chosen))


def chooses_rounds(control: str | Policy | Target) -> bool:
    """Return whether a control may mix with other rounds than the schedule's."""
    chosen = parse_control(control) if isinstance(control, str) else control
    return not isinstance(chosen, Plain) and not getattr(chosen, "follows_schedule", False)


def make_round_source(
    control: str | Policy | Target,
    schedule: Schedule,
    algorithm: Algorithm,
    gossip_steps: int,
    every: int = 1,
    fragments: int = 1,
) -> Callable[[Meter], RoundSource]:
    """Check the settings; return a function from the engine's meter to its round source.

    Args:
        control: a string such as ``"constant(c=0.25)"``, a target or a control.
        schedule: what plain gossip mixes with.
        algorithm: when a step mixes.
        gossip_steps: how often plain gossip mixes per step; more than once under atc only.
        every: steps from one exchange of the schedule to the next.
        fragments: into how many the parameters are split; exchanges send them in turn.
    """
    if gossip_steps < 1:
        raise UserError(
            f"gossip_steps must be at least 1, got {gossip_steps}; leave it out to mix once"
        )
    if gossip_steps > 1 and not algorithm.repeats:
        raise UserError(
            f"{algorithm.name} mixes once per step, got gossip_steps={gossip_steps}; use "
            "algorithm='atc', or a denser topology"
        )
    chosen = parse_control(control) if isinstance(control, str) else control
    if isinstance(chosen, Plain):
        return lambda meter: _Scheduled(schedule, gossip_steps)
    if not algorithm.plain:
        raise UserError(
            f"{algorithm.name} mixes with the rounds of its topology, got the control "
            f"{name_of(chosen)}, which chooses others; use algorithm='awc' or 'atc'"
        )
    if gossip_steps > 1:
        raise UserError(
            f"a control decides how often to mix, got gossip_steps={gossip_steps} beside it; "
            "leave gossip_steps out"
        )
    if fragments > 1:
        raise UserError(
            f"a control decides on exchanges of all parameters, got fragments={fragments} beside "
            f"{name_of(chosen)}; leave fragments out"
        )
    if every > 1 and chooses_rounds(chosen):
        raise UserError(
            f"a control that chooses rounds decides when to exchange, got every={every} beside "
            f"{name_of(chosen)}; leave every out, or use 'local_steps(constant(c=1))', which waits "
            "until workers are too far apart"
        )
    _check_name(chosen)
    controller = bind(chosen, schedule, "awc" if algorithm.overlaps else "atc")
    if not isinstance(cast(object, controller), Controller):
        raise PlugInError(
            "a policy's bind must return an object with start, needs, decide, save and load, got "
            f"{controller!r} from {chosen!r}; return a controller"
        )
    digest_of_data(controller.save(controller.start(0)))  # fail before ranks connect
    name = f"{name_of(chosen)} on {schedule.name} of {schedule.num_workers} workers"
    return lambda meter: _Controlled(controller, name, overlapped=algorithm.overlaps, meter=meter)


def _check_name(control: Policy | Target) -> None:
    """Raise on a default repr: the handshake and saved states could not distinguish settings."""
    if type(control).__repr__ is object.__repr__:
        raise PlugInError(
            f"a target or policy must have a repr with its settings, got {control!r}; make "
            f"{type(control).__name__} a dataclass, or give it a __repr__"
        )


@final
class _Scheduled:
    """Plain gossip: the schedule's rounds."""

    decision = None

    def __init__(self, schedule: Schedule, gossip_steps: int) -> None:
        self._schedule = schedule
        self._gossip_steps = gossip_steps

    def before_update(self, step: int) -> None:
        pass

    def rounds(self, step: int) -> tuple[Round, ...]:
        return (self._schedule.round(step),) * self._gossip_steps

    resume = rounds

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        pass


@final
class _Controlled:
    """A controller's rounds, with its observations gathered when the order has them."""

    def __init__(
        self, controller: Controller[Any], name: str, *, overlapped: bool, meter: Meter
    ) -> None:
        self._controller = controller
        self._name = name
        self._overlapped = overlapped
        self._meter = meter
        self._restart(controller.start(0), Observation(step=0, lr=0.0))

    def _restart(self, state: Any, seen: Observation) -> None:
        self.decision: Decision | None = None
        # - The input of the last decision, from which ``resume`` recomputes it. Checkpoints have
        #   the state before it: from the state after it, memories would count the observation twice
        self._state = self._state_before = state
        self._seen = seen
        # - Collectives in flight for the next decision
        self._lr: Callable[[], float] = lambda: 0.0
        self._sketches: Gathered | None = None
        self._gradients: Gathered | None = None
        self._points: Gathered | None = None

    def before_update(self, step: int) -> None:
        # Compare the step and the state along with the rate: ranks in different states would start
        # different collectives, and deadlock.
        digest = digest_of_data(self._controller.save(self._state))
        self._lr = self._meter.begin_lr(f"a decision of {self._name} at {step} in state {digest}")
        needs = self._controller.needs(step + self._overlapped, self._state)
        self._gradients = self._meter.begin_gradients() if needs.gradients else None
        # Under awc gradients were taken at the parameters that are mixed: already measured.
        apart = needs.points and not self._overlapped
        self._points = self._meter.begin_parameters() if apart else None

    def rounds(self, step: int) -> tuple[Round, ...]:
        lr = self._lr()
        if not self._overlapped and self._controller.needs(step, self._state).sketches:
            self._sketches = self._meter.begin_parameters()
        sketches = _waited(self._sketches)
        gradients = _waited(self._gradients)
        self._seen = Observation(
            step=step,
            lr=lr,
            sketches=sketches,
            gradients=gradients,
            points=_waited(self._points) if not self._overlapped else sketches,
        )
        self._state_before = self._state  # decide() must not modify it; resume() needs it again
        return self.resume(step)

    def resume(self, step: int) -> tuple[Round, ...]:
        self.decision, self._state = self._controller.decide(self._seen, self._state_before)
        ahead = self._overlapped and self._controller.needs(step + 1, self._state).sketches
        self._sketches = self._meter.begin_parameters() if ahead else None
        return self.decision.rounds

    def state_dict(self) -> dict[str, Any]:
        seen = None
        if self.decision is not None:
            seen = {name: _saved(getattr(self._seen, name)) for name in _OBSERVED}
        saved = self._controller.save(self._state_before)
        return {"name": self._name, "state": saved, "seen": seen}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        own = _canonical(state.get("name", "")) == _canonical(self._name)
        # A collective on every rank, whatever it loads: ranks with different states raise here.
        lr = self._meter.begin_lr(f"loading {'its' if own else 'no'} state into {self._name}")()
        if not own:
            _log.warning("the state is not of %s, which is reset at step %d", self._name, step)
            self._restart(self._controller.start(step), Observation(step=step, lr=lr))
            return
        self._restart(self._controller.load(state["state"]), Observation(step=step, lr=lr))
        if state["seen"] is not None:
            loaded = {name: _loaded(value) for name, value in state["seen"].items()}
            self._seen = Observation(**loaded)
            self.decision, self._state = self._controller.decide(self._seen, self._state_before)


def _canonical(name: str) -> str:
    """Return a name with numbers normalized, so that 1 and 1.0 compare equal."""
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", lambda number: repr(float(number[0])), name)


def _saved(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _loaded(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value


def _waited(gathered: Gathered | None) -> FloatArray | None:
    return None if gathered is None else gathered()
