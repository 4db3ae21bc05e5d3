"""The state that a worker that joins receives from its donor.

Whatever training changes and a restart would lose must be packed here, or be reset on all members
when they change.
"""

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
"""Settings of a parameter group that stay the joiner's own under a learning-rate scheduler, which
computes from them. A scheduler sets the second one when it is made."""


@final
class Donation:
    """Serializes a donor's model and optimizers between two updates, and loads them in a joiner.

    The state of algorithms, wire formats and controllers is left out: it is reset on all members
    whenever they change.

    Args:
        model: all its parameters and buffers are packed.
        optimizers: all their state and settings are; under a learning-rate scheduler a joiner keeps
            its own rates.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers

    def pack(self) -> bytes:
        """Return the state as safetensors, or the reason why it cannot be serialized."""
        try:
            return snapshot.to_bytes(
                {
                    "tensors": dict(self._tensors()),
                    "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                }
            )
        except UserError as error:  # only the joiner raises; the donor continues
            return snapshot.to_bytes({"refused": str(error)})

    @torch.no_grad()
    def load(self, data: bytes) -> None:
        """Load what a donor has packed, bit for bit."""
        state = snapshot.from_bytes(data)
        if "refused" in state:
            raise UserError(
                f"a donor must be able to serialize its state, and cannot: {state['refused']}"
            )
        for name, tensor in self._tensors().items():
            tensor.copy_(state["tensors"][name])
        for optimizer, theirs in zip(self._optimizers, state["optimizers"], strict=True):
            _keep_rates(optimizer, theirs["param_groups"])
            optimizer.load_state_dict(theirs)
            # A scheduler warns if it steps before its optimizer has; the donor's optimizer has.
            untyped: Any = optimizer
            untyped._opt_called = True

    def _tensors(self) -> dict[str, Tensor]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}


def _keep_rates(optimizer: Optimizer, theirs: Sequence[dict[str, Any]]) -> None:
    """Replace the learning rates in a donor's groups by this optimizer's own.

    Without a scheduler the donor's stay: only the training loop can have changed them.
    """
    for ours, group in zip(optimizer.param_groups, theirs, strict=True):
        if "initial_lr" not in ours and "initial_lr" not in group:
            continue
        if float(ours["lr"]) != float(group["lr"]):
            _log.warning(
                "this worker joins with the learning rate %g, and its donor has %g; if a scheduler "
                "sets it, advance the scheduler: "
                "`for _ in range(gossip.num_steps): scheduler.step()`",
                ours["lr"],
                group["lr"],
            )
        for name in _OWN:
            group.pop(name, None)
            if name in ours:
                group[name] = ours[name]
