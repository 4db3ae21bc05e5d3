"""What one rank measures of its parameters and gradients, for all ranks to know."""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from gossamer.consensus import Gathered, OutlierWatch, Sketch, tensor_norms
from gossamer.gossip.collectives import Collectives
from gossamer.topology.arrays import FloatArray

_log = logging.getLogger(__name__)

_NOT_TRAINING = -1
"""In place of a learning rate; these are not the bits of one."""


@final
class RankMeter:
    """Measures this rank, and gathers what all ranks measured.

    Args:
        trained: the parameters, in an order that is the same on all ranks.
        optimizers: the first one's learning rate is the one that a controller sees.
        collectives: how measurements travel.
        weight: how much of the sum of all parameters this worker has, where that is not 1.
    """

    def __init__(
        self,
        trained: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
        collectives: Collectives,
        weight: Tensor,
    ) -> None:
        self._trained = trained
        self._optimizer = optimizers[0]
        self._collectives = collectives
        self._weight = weight
        self._sketch = Sketch()
        self._outliers = OutlierWatch("rank", _log)
        self.training = True
        """Whether this rank takes steps of its own, and not only mixes inside join()."""

    def begin_parameters(self) -> Gathered:
        """Begin to collect sketches of all workers' parameters."""
        collect = self._begin(self._trained)
        return lambda: self._outliers.look(collect())

    def begin_gradients(self) -> Gathered:
        """Begin to collect sketches of all workers' gradients."""
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._trained]
        if not self.training:
            return self._begin(grads, math.nan)  # of a step that was not taken
        # A fused optimizer gets gradients as a GradScaler has scaled them.
        scaled = getattr(self._optimizer, "grad_scale", None)
        return self._begin(grads, 1.0 if scaled is None else 1 / float(scaled))

    def begin_lr(self, about: str) -> Callable[[], float]:
        """Begin to agree on the learning rate: that of the first rank which still trains."""
        own = float(self._optimizer.param_groups[0]["lr"])
        # As the bits of a float: what is gathered are integers.
        (bits,) = struct.unpack("<q", struct.pack("<d", own))
        collect = self._collectives.begin_gather(bits if self.training else _NOT_TRAINING, about)

        def agreed() -> float:
            training = [value for value in collect() if value != _NOT_TRAINING]
            return struct.unpack("<d", struct.pack("<q", training[0]))[0] if training else own

        return agreed

    def count_training(self) -> int:
        """Return how many ranks still take steps of their own, at a step inside join()."""
        return sum(self._collectives.begin_gather(int(self.training), "a step inside join()")())

    def norms(self) -> FloatArray:
        """Return the L2 norms [T, W] of every parameter tensor of every worker."""
        own = torch.from_numpy(tensor_norms([tensor.unsqueeze(0) for tensor in self._trained]))
        row = own[:, 0].to(self._trained[0].device) / self._weight
        collect = self._collectives.begin_gather_rows(row, "the norms of all ranks")
        return collect().T.numpy(force=True)

    def _begin(self, tensors: Sequence[Tensor], scale: float = 1.0) -> Gathered:
        with record_function("Gossip::sketch"):
            row = self._sketch.sketch(tensors).mul_(scale)
            collect = self._collectives.begin_gather_rows(row, "the sketches of all ranks")
        return lambda: collect().numpy(force=True)
