"""The observations of simulated workers, for controllers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.consensus import Gathered, OutlierWatch, Sketch

_log = logging.getLogger(__name__)


@final
class StackedMeter:
    """Sketches of all workers at once, from stacked tensors; nothing is asynchronous."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._sketch = Sketch()
        self._outliers = OutlierWatch("worker", _log)

    def begin_parameters(self) -> Gathered:
        """Return sketches of all workers' parameters, as they are now."""
        measured = self._measured(list(self._parameters.values()))
        return lambda: self._outliers.look(measured())

    def begin_gradients(self) -> Gathered:
        """Return sketches of all workers' gradients, zeros where there are none."""
        parameters = self._parameters.values()
        return self._measured(
            [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        )

    def begin_lr(self, about: str) -> Callable[[], float]:
        """Return the learning rate, which is the same for all workers here."""
        return lambda: float(self._optimizer.param_groups[0]["lr"])

    def _measured(self, tensors: Sequence[Tensor]) -> Gathered:
        sketches = self._sketch.sketch_stacked(tensors).numpy(force=True)
        return lambda: sketches
