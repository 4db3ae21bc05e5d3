"""Least squares with a known optimum, on clusters of points for heterogeneous workers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.workloads.evaluation import MeanMetric
from gossamer.workloads.workload import Data, Recipe, Samples, Workload

_DIMENSION = 32
_CLUSTERS, _PER_CLUSTER = 16, 64
_CURVATURES = (0.05, 1.0)
"""Smallest and largest eigenvalue of AᵀA: a condition number of 20."""


def quadratic() -> Workload:
    """f(x) = mean over points b of ½‖A(x − b)‖², whose optimum is the mean point.

    Points lie around the centres of clusters, which are their labels: with the sharding
    ``dirichlet(alpha=0.1)`` each worker's own optimum is far from the global one. The metric is
    f(x) − f* ≥ 0 over the training points; there is no test set.
    """
    return Workload(
        name="quadratic",
        version=1,
        num_train=_CLUSTERS * _PER_CLUSTER,
        make_model=_Residual,
        load=_load,
        loss=lambda outputs, targets: outputs.square().sum(-1).mean() / 2,
        metric_name="excess loss",
        higher_is_better=False,
        evaluate=MeanMetric(_excess_loss, _mean_point),
        target=0.05,
        recipe=Recipe(
            optimizer="sgd",
            optimizer_options={},
            lr=0.5,
            lr_schedule="cosine",
            batch_size=8,
            epochs=10,
            steps_per_epoch=20,
        ),
    )


class _Residual(nn.Module):
    """A(x − b) for points b, with A diagonal."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(_DIMENSION))
        low, high = np.log10(_CURVATURES)
        self.register_buffer("scale", torch.logspace(low, high, _DIMENSION).sqrt())

    def forward(self, points: Tensor) -> Tensor:
        return self.scale * (self.x - points)


@cache
def _load() -> Data:
    generator = np.random.default_rng(0)
    centres = generator.normal(2.0, 2.0, (_CLUSTERS, 1, _DIMENSION))
    points = centres + generator.normal(0.0, 1.0, (_CLUSTERS, _PER_CLUSTER, _DIMENSION))
    inputs = torch.from_numpy(points.reshape(-1, _DIMENSION))
    labels = torch.arange(_CLUSTERS).repeat_interleave(_PER_CLUSTER)
    return Data(inputs, labels, inputs, labels, labels)


# f(x) − f* = ½‖A(x − b̄)‖², from the model's outputs at the mean point: a difference of two large
# numbers would cancel.


def _mean_point(data: Data, _dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    yield _mean(data.train_inputs), torch.zeros(1)


@cache
def _mean(points: Samples) -> Tensor:
    return points[torch.arange(len(points))].mean(0)


def _excess_loss(outputs: Tensor, _targets: Tensor) -> Tensor:
    return outputs.double().square().sum() / 2
