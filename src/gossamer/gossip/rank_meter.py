"""Measurements of parameters and gradients, gathered from all ranks."""

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
from gossamer.gossip.shards import local, locals_of
from gossamer.gossip.within import Within
from gossamer.topology.arrays import FloatArray

_log = logging.getLogger(__name__)

_NOT_TRAINING = -1
"""In place of a learning rate; as bits of a float64 it is a NaN, which no rate is."""


@final
class RankMeter:
    """Measures this rank, and gathers the measurements of all ranks.

    Args:
        trained: the parameters, in the same order on all ranks.
        optimizers: controllers observe the learning rate of the first one.
        collectives: gathers measurements.
        weight: the worker's weight under push-sum, otherwise 1.
        within: the ranks that hold shards of the same parameters.
    """

    def __init__(
        self,
        trained: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
        collectives: Collectives,
        weight: Tensor,
        within: Within | None = None,
    ) -> None:
        self._trained = trained
        self._optimizer = optimizers[0]
        self._collectives = collectives
        self._weight = weight
        self._within = within or Within()
        # The sketches of a replica's shards are summed. They need different random signs on every
        # rank of a node: with equal signs, differences of opposite sign in two shards would cancel.
        self._sketch = Sketch(seed=self._within.place)
        self._outliers = OutlierWatch("rank", _log)
        self.training = True
        """Whether this rank still trains; False while it only mixes inside join()."""

    def begin_parameters(self) -> Gathered:
        """Start to gather sketches of all workers' parameters."""
        collect = self._begin(locals_of(self._trained))
        return lambda: self._outliers.look(collect())

    def begin_gradients(self) -> Gathered:
        """Start to gather sketches of all workers' gradients."""
        grads = [
            local(p.grad if p.grad is not None else torch.zeros_like(p)) for p in self._trained
        ]
        if not self.training:
            return self._begin(grads, math.nan)  # this rank has no gradient at this step
        # A fused optimizer receives gradients before a GradScaler has unscaled them.
        scaled = getattr(self._optimizer, "grad_scale", None)
        return self._begin(grads, 1.0 if scaled is None else 1 / float(scaled))

    def begin_lr(self, about: str) -> Callable[[], float]:
        """Start to agree on the learning rate: that of the first rank which still trains."""
        own = float(self._optimizer.param_groups[0]["lr"])
        # As the bits of a float64, because integers are gathered.
        (bits,) = struct.unpack("<q", struct.pack("<d", own))
        collect = self._collectives.begin_gather(bits if self.training else _NOT_TRAINING, about)

        def agreed() -> float:
            training = [value for value in collect() if value != _NOT_TRAINING]
            return struct.unpack("<d", struct.pack("<q", training[0]))[0] if training else own

        return agreed

    def count_training(self) -> int:
        """Return how many ranks still train, at a step inside join()."""
        return sum(self._collectives.begin_gather(int(self.training), "a step inside join()")())

    def norms(self) -> FloatArray:
        """Return the L2 norms [T, W] of every parameter tensor of every worker."""
        own = tensor_norms([tensor.unsqueeze(0) for tensor in locals_of(self._trained)])
        whole = torch.from_numpy(self._within.norms(own, "norms"))[:, 0]
        row = whole.to(self._trained[0].device) / self._weight
        collect = self._collectives.begin_gather_rows(row, "the norms of all ranks")
        return collect().T.numpy(force=True)

    def _begin(self, tensors: Sequence[Tensor], scale: float = 1.0) -> Gathered:
        with record_function("Gossip::sketch"):
            some = [tensor for tensor in tensors if tensor.numel()]
            row = self._sketch.sketch(some or [torch.zeros(1, device=tensors[0].device)])
            what = "the sketches of all ranks"
            collect = self._collectives.begin_gather_rows(row.mul_(scale), what)
        return lambda: self._within.total(collect(), "sketches").numpy(force=True)
