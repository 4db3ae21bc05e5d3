"""Sketches of one rank's parameters and gradients, for a controller on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from gossamer.consensus import Gathered, Sketch
from gossamer.gossip.transport import Transport


@final
class RankMeter:
    """Measures this rank, and gathers what all ranks measured.

    Args:
        trained: the parameters, in an order that is the same on all ranks.
        optimizers: the first one's learning rate is the one that a controller sees.
        transport: how sketches travel.
    """

    def __init__(
        self, trained: Sequence[Tensor], optimizers: Sequence[Optimizer], transport: Transport
    ) -> None:
        self._trained = trained
        self._optimizer = optimizers[0]
        self._transport = transport
        self._sketch = Sketch()

    def begin_parameters(self) -> Gathered:
        """Begin to collect sketches of all workers' parameters."""
        return self._begin(self._trained)

    def begin_gradients(self) -> Gathered:
        """Begin to collect sketches of all workers' gradients."""
        return self._begin(
            [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._trained]
        )

    def lr(self) -> float:
        """Return the learning rate."""
        return float(self._optimizer.param_groups[0]["lr"])

    def _begin(self, tensors: Sequence[Tensor]) -> Gathered:
        with record_function("Gossip::sketch"):
            collect = self._transport.begin_gather_rows(self._sketch.sketch(tensors))
        return lambda: collect().numpy(force=True)
