"""A PI controller as a user would write it: outside of the package, with a state of its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gossamer.consensus import Decision, Needs, Observation, sketch_distance
from gossamer.topology import Schedule, complete


class Pi:
    """Mixes more the further log Ξ is above a set point, and the longer it has been."""

    def __init__(self, log_distance: float, kp: float = 2.0, ki: float = 0.3) -> None:
        self.log_distance, self.kp, self.ki = log_distance, kp, ki

    def bind(self, schedule: Schedule, order: str) -> PiController:
        """Under awc there is one round to choose; under atc it may be repeated."""
        return PiController(self, schedule, repeats=order == "atc")

    def __repr__(self) -> str:
        return f"Pi({self.log_distance}, {self.kp}, {self.ki})"


class Integral:
    """A state that is no dataclass and knows nothing of the package."""

    def __init__(self, error: float, history: tuple[float, ...] = ()) -> None:
        self.error, self.history = error, history


class PiController:
    """It wants to mix 1 + kp·e + ki·Σe times, with e = log Ξ − set point."""

    def __init__(self, pi: Pi, schedule: Schedule, repeats: bool) -> None:
        self._pi, self._schedule, self._repeats = pi, schedule, repeats

    def start(self, step: int) -> Integral:
        """Nothing has been summed up."""
        return Integral(0.0)

    def needs(self, step: int, state: Integral) -> Needs:
        """The distance, at every step."""
        return Needs(sketches=True)

    def decide(self, seen: Observation, state: Integral) -> tuple[Decision, Integral]:
        """Repeat the schedule's round, or take the complete graph for several."""
        round = self._schedule.round(seen.step)
        if seen.sketches is None:  # the first step under awc
            return Decision((round,), math.nan, math.inf), state
        distance = sketch_distance(seen.sketches)
        error = math.log(distance + 1e-12) - self._pi.log_distance
        state = Integral(state.error + error, (*state.history[-3:], error))
        wanted = 1 + self._pi.kp * error + self._pi.ki * state.error
        count = int(np.clip(math.floor(wanted + 0.5), 1, 6))
        rounds = (round,) * count
        if not self._repeats:
            rounds = (complete(self._schedule.num_workers) if count > 3 else round,)
        return Decision(rounds, distance, math.exp(self._pi.log_distance)), state

    def save(self, state: Integral) -> dict[str, Any]:
        """Plain data."""
        return {"error": state.error, "history": list(state.history)}

    def load(self, saved: dict[str, Any]) -> Integral:
        """From plain data."""
        return Integral(saved["error"], tuple(saved["history"]))
