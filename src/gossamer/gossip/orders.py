"""When mixing happens around an optimizer's step; see decentralize.py for the two updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from gossamer.errors import UserError
from gossamer.gossip.mixer import Mixer, State
from gossamer.topology import Schedule


class Order(Protocol):
    """What a gossip does before and after step t."""

    def before_step(self, mixer: Mixer) -> None:
        """Come between backward pass and update."""
        ...

    def after_step(self, mixer: Mixer, schedule: Schedule, step: int) -> None:
        """Come between update and next forward pass."""
        ...

    def resume(self, mixer: Mixer, schedule: Schedule, step: int) -> None:
        """Bring an idle mixer to where it is before a step that others led up to."""
        ...


@final
class _AdaptWhileCombine:
    def __init__(self, gossip_steps: int) -> None:
        if gossip_steps != 1:
            raise UserError(
                f"awc mixes once per step, while the gradient is computed, got gossip_steps="
                f"{gossip_steps}; use order='atc', or a denser topology"
            )

    def before_step(self, mixer: Mixer) -> None:
        if mixer.state is not State.IDLE:  # idle at step 0: all start equal
            mixer.finish()

    def after_step(self, mixer: Mixer, schedule: Schedule, step: int) -> None:
        self.resume(mixer, schedule, step + 1)

    def resume(self, mixer: Mixer, schedule: Schedule, step: int) -> None:
        mixer.start(schedule.round(step), step)


@final
class _AdaptThenCombine:
    def __init__(self, gossip_steps: int) -> None:
        if gossip_steps < 1:
            raise UserError(
                f"gossip_steps must be at least 1, got {gossip_steps}; leave it out to mix once"
            )
        self._gossip_steps = gossip_steps

    def before_step(self, mixer: Mixer) -> None:
        pass

    def after_step(self, mixer: Mixer, schedule: Schedule, step: int) -> None:
        for _ in range(self._gossip_steps):
            mixer.start(schedule.round(step), step)
            mixer.finish()

    def resume(self, mixer: Mixer, schedule: Schedule, step: int) -> None:
        pass


ORDERS: dict[str, Callable[[int], Order]] = {
    "awc": _AdaptWhileCombine,
    "atc": _AdaptThenCombine,
}
