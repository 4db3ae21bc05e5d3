"""The ``StepContext`` of a rank: one worker's tensors, and exchanges with its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms import PARAMETERS, Algorithm, rates_of, states_of, unfinished
from gossamer.consensus import RoundSource
from gossamer.errors import UserError
from gossamer.gossip import step_call
from gossamer.gossip.mixer import Mixer, MixerState
from gossamer.gossip.replica import Replica
from gossamer.gossip.shards import local, locals_of, sharded_as
from gossamer.topology import Round, nobody
from gossamer.wire import Packing


@final
class RankContext:
    """A ``StepContext`` of one worker.

    Args:
        trained: its parameters.
        names: their names in the model's state.
        algorithm: the algorithm that runs on it.
        optimizers: the optimizers that update the parameters.
        replica: holds the states of the algorithm.
        mixers: a mixer per exchanged state, by name.
        source: returns the rounds of every step, and observes gradients before the update.
        packing: the buckets that each step exchanges.
    """

    def __init__(
        self,
        trained: Sequence[Tensor],
        names: Sequence[str],
        algorithm: Algorithm,
        optimizers: Sequence[Optimizer],
        replica: Replica,
        mixers: Mapping[str, Mixer],
        source: RoundSource,
        packing: Packing,
    ) -> None:
        self._trained = trained
        self._names = names
        self._algorithm = algorithm
        self._optimizers = optimizers
        self._replica = replica
        self._mixers = mixers
        self.mixer = mixers[PARAMETERS]
        """The mixer of parameters, which may be in flight between two steps; no other may."""
        self.source = source
        self._packing = packing
        self._started: dict[str, Sequence[int]] = {}  # the buckets in flight, by state
        self.first_mixed = 0
        """The first step that is mixed. Earlier ones are local, as other members are past them."""
        self._to_agree_on = ""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters of this rank, or its shards of them."""
        return locals_of(self._trained)

    def gradients(self) -> Sequence[Tensor]:
        """Return the gradients; zeros if the loss did not depend on a parameter."""
        self._refuse_scaled()
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                raise UserError(
                    "an algorithm that reads gradients needs dense ones, got a sparse one; use "
                    "sparse=False in nn.Embedding, or algorithm='awc'"
                )
        return [local(p.grad) for p in self._trained if p.grad is not None]

    def _refuse_scaled(self) -> None:
        """Raise if a GradScaler has not yet unscaled gradients, or checked them for infinities."""
        if not step_call.is_scaled():
            return
        fused = any(getattr(each, "found_inf", None) is not None for each in self._optimizers)
        if fused or len(self._optimizers) > 1:
            raise UserError(
                "an algorithm that reads gradients needs all of them unscaled and finite before "
                f"the first update, got a GradScaler with {'a fused optimizer' if fused else ''}"
                f"{'' if fused else f'{len(self._optimizers)} optimizers'}; use one optimizer "
                "with fused=False, or train in bfloat16 without a scaler"
            )

    def memory(self, name: str) -> Sequence[Tensor]:
        """Return a state of the algorithm."""
        return self._replica.states[name]

    def weights(self) -> Sequence[Tensor]:
        """Return the worker's weight, for each parameter."""
        weight = self._replica.weight[0]
        return [weight.to(parameter.dtype) for parameter in self._trained]

    def reset_weight(self) -> None:
        """Set the worker's weight to 1."""
        self._replica.weight.fill_(1.0)

    def learning_rates(self) -> Sequence[float]:
        """Return the learning rate of each parameter."""
        return rates_of(self._optimizers, self._trained)

    def optimizer_state(self, name: str) -> Sequence[Tensor]:
        """Return a state tensor of the optimizers for each parameter."""
        return locals_of(states_of(self._optimizers, self._trained, name))

    def rounds(self, step: int) -> Sequence[Round]:
        """Return the rounds of a step."""
        if step < self.first_mixed:
            return (nobody(self.mixer.size),)
        return self._note_decision(self.source.rounds(step))

    def resumed_rounds(self, step: int) -> Sequence[Round]:
        """Return the rounds that ``rounds`` returned."""
        if step < self.first_mixed:
            return (nobody(self.mixer.size),)
        return self._note_decision(self.source.resume(step))

    def start(self, round: Round, step: int, state: str = PARAMETERS) -> None:
        """Start to exchange a state."""
        if step < self.first_mixed:
            return
        agrees_on, self._to_agree_on = self._to_agree_on, ""  # once per decision, not per exchange
        self._started[state] = buckets = self._packing.at(step)
        self._replica.collect(state, buckets)
        self._mixers[state].start(round, step, buckets=buckets, agrees_on=agrees_on)

    def finish(self, state: str = PARAMETERS) -> None:
        """Wait for the exchange of a state, and mix it."""
        mixer = self._mixers[state]
        if mixer.state is not MixerState.IDLE:
            mixer.finish()
            self._replica.spread(state, self._started[state])

    def refuse_unfinished(self) -> None:
        """Raise if a state other than the parameters is in flight after a step."""
        for state, mixer in self._mixers.items():
            if mixer is not self.mixer and mixer.state is MixerState.IN_FLIGHT:
                raise unfinished(self._algorithm, state)

    def _note_decision(self, rounds: tuple[Round, ...]) -> tuple[Round, ...]:
        """Make the next exchange compare the decision's digest: it must be equal on all ranks."""
        decision = self.source.decision
        self._to_agree_on = "" if decision is None else decision.digest
        return rounds

    def drop(self) -> None:
        """Release exchanges in flight, without waiting for them."""
        for mixer in self._mixers.values():
            mixer.drop()

    def close(self) -> None:
        """Wait for exchanges in flight, and release all memory."""
        for mixer in self._mixers.values():
            mixer.close()

    # - State

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state; references, as in torch."""
        state: dict[str, Any] = {
            name: [sharded_as(t, p) for t, p in zip(tensors, self._trained, strict=True)]
            for name, tensors in self._replica.states.items()
            if name not in self._algorithm.scratch
        }
        if not self._replica.weighted:
            return state
        # An average of saved replicas weights exactly these tensors, and not moments or statistics.
        return {**state, "weight": self._replica.weight, "weighed": [*self._names]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of the same algorithm."""
        for name in self._replica.states.keys() - {*self._algorithm.scratch}:
            for tensor, saved in zip(self._replica.states[name], state[name], strict=True):
                tensor.copy_(local(saved))
        if self._replica.weighted:
            self._replica.weight.copy_(state["weight"])
