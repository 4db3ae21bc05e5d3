"""What a worker that joins gets from one that is there: all that training has come to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.errors import UserError
from gossamer.gossip import snapshot

_log = logging.getLogger(__name__)

_OWN = ("lr", "initial_lr")
"""What a group of parameters keeps under a scheduler, which counts from there. The second is only
there where one has been made."""


@final
class Donation:
    """Packs one worker's model and optimizers between two updates; loads another's.

    Memory of algorithms, wire formats and controls is not in it: when members change, that starts
    anew on all of them.

    Args:
        model: all its parameters and buffers.
        optimizers: all their state, and their settings but for learning rates.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers

    def pack(self) -> bytes:
        """Return all of it as safetensors; where that cannot be, why."""
        try:
            return snapshot.to_bytes(
                {
                    "tensors": dict(self._tensors()),
                    "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                }
            )
        except UserError as error:  # of whoever asks, and not of this worker
            return snapshot.to_bytes({"refused": str(error)})

    @torch.no_grad()
    def load(self, data: bytes) -> None:
        """Become what another worker has packed, bit for bit."""
        state = snapshot.from_bytes(data)
        if "refused" in state:
            raise UserError(
                f"a worker cannot join, because another cannot give: {state['refused']}"
            )
        for name, tensor in self._tensors().items():
            tensor.copy_(state["tensors"][name])
        for optimizer, theirs in zip(self._optimizers, state["optimizers"], strict=True):
            _keep_rates(optimizer, theirs["param_groups"])
            optimizer.load_state_dict(theirs)
            # Schedulers ask whether it has taken a step before they take theirs: another's it has.
            untyped: Any = optimizer
            untyped._opt_called = True

    def _tensors(self) -> dict[str, Tensor]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}


def _keep_rates(optimizer: Optimizer, theirs: Sequence[dict[str, Any]]) -> None:
    """Give the groups that are to be loaded this optimizer's own learning rates.

    But where there is no scheduler: then the rate is what others have come to by other means.
    """
    for ours, group in zip(optimizer.param_groups, theirs, strict=True):
        if "initial_lr" not in ours and "initial_lr" not in group:
            continue
        if float(ours["lr"]) != float(group["lr"]):
            _log.warning(
                "this worker joins with the learning rate %g, and the one that it joins from has "
                "%g; where a scheduler sets it, let it follow: "
                "`for _ in range(gossip.num_steps): scheduler.step()`",
                ours["lr"],
                group["lr"],
            )
        for name in _OWN:
            group.pop(name, None)
            if name in ours:
                group[name] = ours[name]
