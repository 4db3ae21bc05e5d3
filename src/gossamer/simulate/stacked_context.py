"""What an algorithm's step works on in a simulation: all workers' tensors, stacked."""

# W: workers

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.algorithms import PARAMETERS, Algorithm, name_of_numbers, states_of, unfinished
from gossamer.consensus import RoundSource
from gossamer.nonfinite import ParameterWatch, measured_norms
from gossamer.simulate.replicas import Replicas
from gossamer.simulate.template import bytes_of
from gossamer.simulate.update import Update
from gossamer.topology import Round

_log = logging.getLogger(__name__)


@final
class StackedContext:
    """A ``StepContext`` of W workers; counts what they would send.

    Args:
        replicas: their parameters and gradients.
        update: what updates them.
        algorithm: what it keeps besides parameters.
        source: gives the rounds of every step.
        nonfinite_rounds: after so many rounds in a row in which a worker's parameters are not
            finite, mixing raises; 0 for never.
    """

    def __init__(
        self,
        replicas: Replicas,
        update: Update,
        algorithm: Algorithm,
        source: RoundSource,
        nonfinite_rounds: int,
    ) -> None:
        self.parameters: Sequence[Tensor] = list(replicas.parameters.values())
        self.given: Round | None = None
        """What this step mixes with in place of its rounds."""
        self._replicas = replicas
        self._update = update
        self._source = source
        num = replicas.num_workers
        kept = (*algorithm.tracked, *algorithm.kept)
        self._states = {name: [torch.zeros_like(p) for p in self.parameters] for name in kept}
        self._algorithm = algorithm
        # - Exchanges in flight, by state: the round, and statistics as they are sent
        self._in_flight: dict[str, tuple[Round, list[Tensor]]] = {}
        self._step = 0
        norms = {PARAMETERS: replicas.measured_norms()} | {
            name: measured_norms(self._states[name]) for name in algorithm.tracked
        }
        self._watches = {
            name: ParameterWatch(
                "worker", range(num), of_state, nonfinite_rounds, _log, name_of_numbers(name)
            )
            for name, of_state in norms.items()
        }
        # - What was sent
        self._copies_sent: npt.NDArray[np.float64] = np.zeros(num)
        self._messages_sent: npt.NDArray[np.int64] = np.zeros(num, np.int64)
        self._weights_sent: npt.NDArray[np.int64] = np.zeros(num, np.int64)
        self._statistics_sent: npt.NDArray[np.float64] = np.zeros(num)
        self.left_out: npt.NDArray[np.int64] = np.zeros(num, np.int64)
        self.mean_moved = 0

    # - What an algorithm sees

    def gradients(self) -> Sequence[Tensor]:
        """Return the gradients; zeros where no worker's loss depended on a parameter."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self.parameters if p.grad is not None]

    def memory(self, name: str) -> Sequence[Tensor]:
        """Return a state that an algorithm keeps."""
        return self._states[name]

    def weights(self) -> Sequence[Tensor]:
        """Return the workers' weights, for each parameter."""
        weight_W = self._replicas.weight
        return [weight_W.to(p.dtype).view(-1, *[1] * (p.dim() - 1)) for p in self.parameters]

    def reset_weight(self) -> None:
        """Let all weights be 1 again."""
        self._replicas.weight.fill_(1.0)

    def learning_rates(self) -> Sequence[float]:
        """Return the rate that each parameter is updated with."""
        return self._update.learning_rates()

    def optimizer_state(self, name: str) -> Sequence[Tensor]:
        """Return tensors that the optimizer keeps for each parameter, of all workers."""
        return states_of([self._update.optimizer], self.parameters, name)

    def rounds(self, step: int) -> Sequence[Round]:
        """Return what a step mixes with."""
        if self.given is not None and not self._algorithm.overlaps:
            return (self.given,)
        return self._source.rounds(step)

    def resumed_rounds(self, step: int) -> Sequence[Round]:
        """Return what ``rounds`` returned."""
        return self._source.resume(step)

    def start(self, round: Round, step: int, state: str = PARAMETERS) -> None:
        """Begin to exchange a state."""
        sent = self._replicas.statistics_to_send() if state == PARAMETERS else []
        self._in_flight[state] = round, sent
        self._step = step

    def finish(self, state: str = PARAMETERS) -> None:
        """Mix a state, and count what was sent."""
        if state not in self._in_flight:
            return
        round, sent = self._in_flight.pop(state)
        if state == PARAMETERS and self.given is not None:
            round = self.given
        if not round.degree and round.num_workers > 1:  # a local step
            return
        replicas = self._replicas
        norms_W = (
            replicas.mix(round, sent)
            if state == PARAMETERS
            else replicas.mix_state(self._states[state], round)
        )
        finite_W = self._watches[state].look(norms_W, self._step)
        if not finite_W.all():
            self.left_out += ~finite_W
            self.mean_moved += not round.symmetric
        self._copies_sent += round.copies_sent
        self._messages_sent += round.messages_sent
        if state == PARAMETERS:
            self._statistics_sent += round.copies_sent
            if replicas.weighted:
                self._weights_sent += round.messages_sent

    def refuse_unfinished(self) -> None:
        """Raise where anything but parameters is left in flight until the next step."""
        for state in self._in_flight.keys() - {PARAMETERS}:
            raise unfinished(self._algorithm, state)

    def forget_norms(self) -> None:
        """Let the next norms be any: parameters have been replaced."""
        for watch in self._watches.values():
            watch.forget_norms()

    # - What was sent

    @property
    def bytes_sent(self) -> npt.NDArray[np.float64]:
        """Bytes that each worker would have sent so far, [W]."""
        replicas = self._replicas
        parameters = self._copies_sent * bytes_of(self.parameters) / replicas.num_workers
        statistics = self._statistics_sent * replicas.statistics_bytes
        return parameters + statistics + self._weights_sent * replicas.weight.itemsize

    @property
    def messages_sent(self) -> npt.NDArray[np.int64]:
        """Messages that each worker would have sent so far, one bucket for all of a state, [W]."""
        return self._messages_sent + self._weights_sent

    # - State

    def state_dict(self) -> dict[str, Any]:
        """Return what an algorithm keeps, and what was sent; references, as in torch."""
        return {
            "name": repr(self._algorithm),
            "states": {
                name: tensors
                for name, tensors in self._states.items()
                if name not in self._algorithm.scratch
            },
            "weight": self._replicas.weight,
            "copies_sent": self._copies_sent.tolist(),
            "messages_sent": self._messages_sent.tolist(),
            "weights_sent": self._weights_sent.tolist(),
            "statistics_sent": self._statistics_sent.tolist(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state on as many workers; one of another algorithm starts anew."""
        self._in_flight.clear()
        self.forget_norms()
        if state["name"] == repr(self._algorithm):
            for name, tensors in state["states"].items():
                for tensor, saved in zip(self._states[name], tensors, strict=True):
                    tensor.copy_(saved)
            self._replicas.weight.copy_(state["weight"])
        else:
            self._algorithm.restart(self)
            if state["states"] or self._states or self._replicas.weighted:
                _log.warning("the state is not of %r, which starts anew", self._algorithm)
        self._copies_sent = np.array(state["copies_sent"])
        self._messages_sent = np.array(state["messages_sent"])
        self._weights_sent = np.array(state["weights_sent"])
        self._statistics_sent = np.array(state["statistics_sent"])
