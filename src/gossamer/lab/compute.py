"""Compute emulated by sleeping, so that a benchmark depends on the network only.

A layer sleeps for its part of the forward and of the backward pass, between real parameters, so
that gradients become ready one after the other as in a real model. All layers of a model share one
pace: an iteration is slow or fast in all of them.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class Pace:
    """The normalized compute time of the current iteration: mean 1 and a given variance.

    Drawn from a gamma distribution, which is positive and has two parameters for the two moments.
    Measured variances: 0.0017 (ResNet-50 on images), 0.0134 (transformer, translation);
    arXiv:2410.11998.

    Args:
        variance: of the normalized time; 0 for a constant pace.
        seed: must differ between workers: with one seed all would be slow at the same steps.
    """

    def __init__(self, variance: float, seed: int) -> None:
        if not 0 <= variance < math.inf:
            raise ValueError(f"a variance must not be negative, got {variance}; use 0 for none")
        self._variance = variance
        self._random = random.Random(seed)
        self.factor = 1.0

    def advance(self) -> None:
        """Draw the factor of the next iteration."""
        if self._variance > 0:
            self.factor = self._random.gammavariate(1 / self._variance, self._variance)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: SleepLayer) -> Tensor:
        ctx.layer = layer
        time.sleep(layer.forward_s * layer.pace.factor)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        layer: SleepLayer = ctx.layer
        time.sleep(layer.backward_s * layer.pace.factor)
        return grad_outputs[0], None


@final
class SleepLayer(nn.Module):
    """The identity in both passes, after a delay.

    Args:
        forward_s: how long the forward pass takes at the mean pace.
        backward_s: how long the backward pass takes at the mean pace.
        pace: shared by the layers of a model.
    """

    def __init__(self, forward_s: float, backward_s: float, pace: Pace) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.pace = pace

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep, and return the inputs."""
        output: Tensor = _Sleep.apply(inputs, self)  # pyright: ignore[reportAssignmentType]
        return output


@final
class EmulatedModel(nn.Module):
    """Square linear layers, each followed by its part of the emulated compute.

    The batch should be small: the layers' own compute comes on top.

    Args:
        num_params: how many parameters, about; split evenly over the layers.
        num_layers: how many layers.
        forward_s: time of a forward pass at the mean pace.
        backward_s: time of a backward pass at the mean pace.
        variance: of the normalized compute time, see Pace.
        seed: of the pace; the parameters follow torch's own seed.
    """

    def __init__(
        self,
        *,
        num_params: int,
        num_layers: int,
        forward_s: float,
        backward_s: float,
        variance: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.width = max(1, round(math.sqrt(num_params / num_layers)))
        self.pace = Pace(variance, seed)
        self.layers = nn.Sequential()
        for _ in range(num_layers):
            linear = nn.Linear(self.width, self.width, bias=False)
            # Variance 1/width keeps the scale of values and gradients through many layers.
            nn.init.normal_(linear.weight, std=1 / math.sqrt(self.width))
            self.layers.append(linear)
            self.layers.append(
                SleepLayer(forward_s / num_layers, backward_s / num_layers, self.pace)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Run a forward pass, at a pace drawn for this iteration."""
        self.pace.advance()
        return self.layers(inputs)
