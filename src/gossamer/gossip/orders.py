"""When mixing happens around an optimizer's step; see decentralize.py for the two updates."""

from __future__ import annotations

from typing import Protocol, final

from gossamer.consensus import Plan
from gossamer.gossip.mixer import Mixer, MixerState
from gossamer.topology import Round


class Order(Protocol):
    """What a gossip does before and after step t."""

    def before_step(self, mixer: Mixer, plan: Plan, step: int) -> None:
        """Come between backward pass and update."""
        ...

    def after_step(self, mixer: Mixer, plan: Plan, step: int) -> None:
        """Come between update and next forward pass."""
        ...

    def resume(self, mixer: Mixer, plan: Plan, step: int) -> None:
        """Bring an idle mixer to where it is before a step that others led up to."""
        ...


@final
class _AdaptWhileCombine:
    def before_step(self, mixer: Mixer, plan: Plan, step: int) -> None:
        plan.before_update(step)
        if mixer.state is not MixerState.IDLE:  # idle at step 0: all start equal
            mixer.finish()

    def after_step(self, mixer: Mixer, plan: Plan, step: int) -> None:
        self._start(mixer, plan, plan.rounds(step + 1), step + 1)

    def resume(self, mixer: Mixer, plan: Plan, step: int) -> None:
        self._start(mixer, plan, plan.again(step), step)

    def _start(self, mixer: Mixer, plan: Plan, rounds: tuple[Round, ...], step: int) -> None:
        (round,) = rounds
        mixer.start(round, step, agrees_on=_digest(plan))


@final
class _AdaptThenCombine:
    def before_step(self, mixer: Mixer, plan: Plan, step: int) -> None:
        plan.before_update(step)

    def after_step(self, mixer: Mixer, plan: Plan, step: int) -> None:
        rounds = plan.rounds(step)
        agrees_on = _digest(plan)
        for round in rounds:
            mixer.start(round, step, agrees_on=agrees_on)
            mixer.finish()
            agrees_on = ""  # on all rounds of the step, before the first

    def resume(self, mixer: Mixer, plan: Plan, step: int) -> None:
        pass


def _digest(plan: Plan) -> str:
    """Return what all ranks must have decided; nothing where they had nothing to decide."""
    return "" if plan.decision is None else plan.decision.digest


ORDERS: dict[str, Order] = {"awc": _AdaptWhileCombine(), "atc": _AdaptThenCombine()}
