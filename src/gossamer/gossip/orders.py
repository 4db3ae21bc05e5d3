"""When a step mixes.

Around the update of step t:

    awc (adapt while combine)              atc (adapt then combine)
    1. finish the exchange of x_t, mix     1. optimizer step
    2. optimizer step                      2. exchange and mix, as often as asked
    3. start the exchange of x_{t+1}

    x_{t+1} = Opt(W_t x_t; g(x_t))         x_{t+1} = W_t Opt(x_t; g(x_t))

Under awc the exchange has the whole next forward and backward pass to hide in, and the gradient was
taken at the unmixed parameters. All workers start equal, so awc's step 0 has nothing to mix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from gossamer.consensus import RoundSource
from gossamer.gossip.mixer import Mixer, MixerState
from gossamer.topology import Round


class Order(Protocol):
    """What a worker does before and after its update at step t."""

    mixes_before_update: bool
    """Whether parameters change between backward pass and update."""

    def before_update(self, step: int) -> None:
        """Come between backward pass and update."""
        ...

    def after_update(self, step: int) -> None:
        """Come between update and next forward pass."""
        ...

    def resume(self, step: int) -> None:
        """Bring an idle mixer to where it is before a step that others led up to."""
        ...


@final
class _AdaptWhileCombine:
    mixes_before_update = True

    def __init__(self, mixer: Mixer, source: RoundSource) -> None:
        self._mixer = mixer
        self._source = source

    def before_update(self, step: int) -> None:
        self._source.before_update(step)
        if self._mixer.state is not MixerState.IDLE:  # idle at step 0: all start equal
            self._mixer.finish()

    def after_update(self, step: int) -> None:
        self._start(self._source.rounds(step + 1), step + 1)

    def resume(self, step: int) -> None:
        self._start(self._source.resume(step), step)

    def _start(self, rounds: tuple[Round, ...], step: int) -> None:
        (round,) = rounds
        self._mixer.start(round, step, agrees_on=_digest_of(self._source))


@final
class _AdaptThenCombine:
    mixes_before_update = False

    def __init__(self, mixer: Mixer, source: RoundSource) -> None:
        self._mixer = mixer
        self._source = source

    def before_update(self, step: int) -> None:
        self._source.before_update(step)

    def after_update(self, step: int) -> None:
        rounds = self._source.rounds(step)
        agrees_on = _digest_of(self._source)
        for round in rounds:
            self._mixer.start(round, step, agrees_on=agrees_on)
            self._mixer.finish()
            agrees_on = ""  # on all rounds of the step, before the first

    def resume(self, step: int) -> None:
        pass


def _digest_of(source: RoundSource) -> str:
    """Return what all ranks must have decided; nothing where they had nothing to decide."""
    return "" if source.decision is None else source.decision.digest


ORDERS: dict[str, Callable[[Mixer, RoundSource], Order]] = {
    "awc": _AdaptWhileCombine,
    "atc": _AdaptThenCombine,
}
