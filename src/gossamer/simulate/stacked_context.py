"""The step context of a simulation: all workers' tensors, stacked."""

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
from gossamer.simulate.coded import CodedBucket
from gossamer.simulate.replicas import Replicas
from gossamer.simulate.template import bytes_of
from gossamer.simulate.update import Update
from gossamer.topology import Round
from gossamer.wire import Packing, Wire

_log = logging.getLogger(__name__)


@final
class StackedContext:
    """A ``StepContext`` of W workers; counts what they would send.

    Args:
        replicas: their parameters and gradients.
        update: what updates them.
        algorithm: what it keeps besides parameters.
        source: gives the rounds of every step.
        wire: the format in which states are sent.
        packing: which tensors share a bucket, and which buckets each step exchanges.
        nonfinite_rounds: after so many rounds in a row in which a worker's parameters are not
            finite, mixing raises; 0 for never.
    """

    def __init__(
        self,
        replicas: Replicas,
        update: Update,
        algorithm: Algorithm,
        source: RoundSource,
        wire: Wire,
        packing: Packing,
        nonfinite_rounds: int,
    ) -> None:
        self.parameters: Sequence[Tensor] = list(replicas.parameters.values())
        self.given: Round | None = None
        """A round that overrides those of this step."""
        self._replicas = replicas
        self._update = update
        self._source = source
        num = replicas.num_workers
        kept = (*algorithm.tracked, *algorithm.kept)
        self._states = {name: [torch.zeros_like(p) for p in self.parameters] for name in kept}
        self._algorithm = algorithm
        # - The wire format of states, and the tensors of each bucket
        self._wire = wire
        self._packing = packing
        exchanged = {PARAMETERS: self.parameters} | {n: self._states[n] for n in algorithm.tracked}
        self._coded = {name: self._code(tensors) for name, tensors in exchanged.items()}
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
        self._bytes_sent: npt.NDArray[np.float64] = np.zeros(num)
        self._messages_sent: npt.NDArray[np.int64] = np.zeros(num, np.int64)
        self._weights_sent: npt.NDArray[np.int64] = np.zeros(num, np.int64)
        self.left_out: npt.NDArray[np.int64] = np.zeros(num, np.int64)
        self.mean_moved = 0

    def _code(self, tensors: Sequence[Tensor]) -> list[CodedBucket]:
        """Return coded buckets of a state; none where it is sent without a codec."""
        coded: list[CodedBucket] = []
        for indices in self._packing.buckets:
            first = tensors[indices[0]]
            codec = self._wire.codec(first.dtype, first.device)
            if codec is not None:
                coded.append(CodedBucket([tensors[i] for i in indices], codec))
        return coded

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
        """Reset all weights to 1."""
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
        self._wire.check_round(round, f"at step {self._step}")
        replicas, buckets = self._replicas, self._packing.at(self._step)
        coded = [self._coded[state][bucket] for bucket in buckets if self._coded[state]]
        if state == PARAMETERS:
            indices = [i for bucket in buckets for i in self._packing.buckets[bucket]]
            whole = [self.parameters[i] for i in indices if not coded]
            norms_W = replicas.mix(round, whole, coded, sent)
        else:
            norms_W = replicas.mix_state(self._states[state], round, coded)
        finite_W = self._watches[state].look(norms_W, self._step)
        self.left_out += ~finite_W
        without = not finite_W.all() and not round.symmetric
        self.mean_moved += without or any(bucket.moved_mean for bucket in coded)
        self._bytes_sent += self._bytes_of(round, buckets)
        self._messages_sent += round.messages_sent * len(buckets)
        if state == PARAMETERS:
            self._bytes_sent += round.copies_sent * replicas.statistics_bytes
            if replicas.weighted:
                self._weights_sent += round.messages_sent

    def refuse_unfinished(self) -> None:
        """Raise where anything but parameters is left in flight until the next step."""
        for state in self._in_flight.keys() - {PARAMETERS}:
            raise unfinished(self._algorithm, state)

    def forget_norms(self) -> None:
        """Reset the watches of norms: parameters have been replaced."""
        for watch in self._watches.values():
            watch.forget_norms()

    # - What was sent

    @property
    def bytes_sent(self) -> npt.NDArray[np.float64]:
        """Bytes that each worker would have sent so far, [W]."""
        return self._bytes_sent + self._weights_sent * self._replicas.weight.itemsize

    def _bytes_of(self, round: Round, buckets: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return what each worker sends of some buckets in a round; an all-reduce is in full."""
        whole = coded = 0
        for bucket in buckets:
            tensors = [self.parameters[i][0] for i in self._packing.buckets[bucket]]
            numel = sum(tensor.numel() for tensor in tensors)
            whole += bytes_of(tensors)
            coded += self._wire.num_bytes(numel, tensors[0].itemsize)
        return round.copies_sent * np.where(round.reduces, whole, coded)

    @property
    def undecoded(self) -> npt.NDArray[np.int64]:
        """How many buckets of others each worker could not decode, [W]."""
        none = np.zeros(self._replicas.num_workers, np.int64)
        return sum((b.undecoded for coded in self._coded.values() for b in coded), start=none)

    @property
    def messages_sent(self) -> npt.NDArray[np.int64]:
        """Messages that each worker would have sent so far, [W]."""
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
            "bytes_sent": self._bytes_sent.tolist(),
            "messages_sent": self._messages_sent.tolist(),
            "weights_sent": self._weights_sent.tolist(),
            "wire": [bucket.state_dict() for bucket in self._coded[PARAMETERS]],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state on as many workers; one of another algorithm is reset."""
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
                _log.warning("the state is not of %r, which is reset", self._algorithm)
        self._bytes_sent = np.array(state["bytes_sent"])
        self._messages_sent = np.array(state["messages_sent"])
        self._weights_sent = np.array(state["weights_sent"])
        CodedBucket.load(self._coded[PARAMETERS], state.get("wire", []))
