"""Mixing in a wire format: worker by worker, by the code that ranks execute.

Buckets are those of ranks, since a message has one range for all of a bucket.
"""

# W: workers, N: numbers of a bucket

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.simulate.mixing import mix_
from gossamer.topology import Round
from gossamer.wire import UNDECODED, Codec, Differences, Outbox, load_outboxes

_log = logging.getLogger(__name__)


class _Role(NamedTuple):
    """One worker's part in a round."""

    self_weight: float
    senders: list[int]
    """In the order in which a rank takes their messages."""

    weights: list[float]
    receivers: list[int]


@final
class CodedBucket:
    """All workers' tensors of one bucket.

    Args:
        tensors: stacked, [W, ...], contiguous, all of one dtype; workers have the same.
        codec: writes and reads messages.
    """

    def __init__(self, tensors: Sequence[Tensor], codec: Codec) -> None:
        self._tensors = [tensor.detach().flatten(1) for tensor in tensors]
        self._codec = codec
        start = torch.cat([tensor[0] for tensor in self._tensors])
        self._outboxes = [Outbox(codec, len(start), start) for _ in self._tensors[0]]
        self._total = torch.empty(len(start), dtype=codec.work)
        self.undecoded: npt.NDArray[np.int64] = np.zeros(len(self._outboxes), np.int64)
        """How many messages each worker could not decode, [W]."""
        self.moved_mean = False
        """Whether that moved the mean, in the last exchange."""

    @torch.no_grad()
    def mix_(self, round: Round, away: Sequence[int]) -> None:
        """Mix in place; what is all-reduced goes in full.

        Args:
            round: on W workers.
            away: workers that are left out.
        """
        self.moved_mean = False
        x_WN = torch.cat(self._tensors, 1)
        reduced = self._reduced(x_WN, round, away) if round.reduces.any() else x_WN
        messages = self._messages(x_WN, away)
        for worker, role in enumerate(_roles(round)):
            if worker in away:
                continue
            if round.reduces[worker]:
                x_WN[worker] = reduced[worker]
                continue
            self._mix_worker_(x_WN[worker], worker, role, messages, round.keeps_consensus)
        sizes = [tensor.shape[1] for tensor in self._tensors]
        for tensor, mixed in zip(self._tensors, x_WN.split(sizes, 1), strict=True):
            tensor.copy_(mixed)

    def _mix_worker_(
        self, x_N: Tensor, worker: int, role: _Role, messages: Sequence[Tensor], keeps_rest: bool
    ) -> None:
        differences = Differences(
            self._codec,
            self._outboxes[worker],
            x_N,
            self._total,
            role.self_weight,
            role.receivers,
            keeps_rest=keeps_rest,
        )
        for sender, weight in zip(role.senders, role.weights, strict=True):
            differences.take(messages[sender], sender, weight)
        differences.complete()
        differences.mix()
        if differences.undecoded and not self.undecoded.any():
            _log.warning(UNDECODED, "worker", worker, "worker", differences.undecoded[0])
        self.undecoded[worker] += len(differences.undecoded)
        self.moved_mean |= differences.moves_mean

    def _messages(self, x_WN: Tensor, away: Sequence[int]) -> list[Tensor]:
        for worker, (outbox, x_N) in enumerate(zip(self._outboxes, x_WN, strict=True)):
            outbox.fill_mark() if worker in away else outbox.fill(x_N)
        return [outbox.message for outbox in self._outboxes]

    def _reduced(self, x_WN: Tensor, round: Round, away: Sequence[int]) -> Tensor:
        exact_WN = x_WN.clone()
        exact_WN[list(away)] = 0  # for a product even a weight of zero makes others NaN
        mix_(exact_WN, round.without(away) if away else round)
        return exact_WN

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what the wire format keeps of each worker, where it keeps anything."""
        states = [outbox.state_dict() for outbox in self._outboxes]
        return [state for state in states if state]

    @staticmethod
    def load(buckets: Sequence[CodedBucket], states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Let all buckets of a state continue from what was kept; anew where that is of others."""
        load_outboxes(
            [outbox for bucket in buckets for outbox in bucket._outboxes],
            [state for of_bucket in states for state in of_bucket],
            [x_N for bucket in buckets for x_N in torch.cat(bucket._tensors, 1)],
        )


@lru_cache(64)
def _roles(round: Round) -> list[_Role]:
    roles: list[_Role] = []
    for worker in range(round.num_workers):
        own = round.neighbours(worker)
        order = np.argsort((own.receives.workers - worker) % round.num_workers)
        senders, weights = own.receives.workers[order], own.receives.weights[order]
        receivers = own.sends.workers.tolist()
        roles.append(_Role(own.self_weight, senders.tolist(), weights.tolist(), receivers))
    return roles
