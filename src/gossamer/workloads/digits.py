"""Handwritten digits, 8 × 8 pixels, 10 classes: real data that comes with scikit-learn."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from gossamer.errors import UserError
from gossamer.workloads.workload import Data, Recipe, Workload

_NUM_TRAIN = 1500
"""Of 1797; the rest is the test."""


def mlp() -> Workload:
    """A network with one hidden layer, 9,610 parameters."""
    return Workload(
        name="digits-mlp",
        version=1,
        num_train=_NUM_TRAIN,
        make_model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        load=_load,
        loss=nn.functional.cross_entropy,
        metric_name="accuracy",
        evaluate=_accuracy,
        target=0.9,
        recipe=Recipe(
            optimizer="sgd",
            optimizer_options={"momentum": 0.9, "nesterov": True},
            lr=0.1,
            lr_schedule="cosine",
            batch_size=16,
            epochs=10,
            steps_per_epoch=25,
        ),
    )


@cache
def _load() -> Data:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "the digits need scikit-learn, which is not installed; pip install 'gossamer[bench]'"
        ) from error
    features, classes = load_digits(return_X_y=True)
    inputs = torch.tensor(features / 16, dtype=torch.float32)
    targets = torch.tensor(classes)
    return Data(
        inputs[:_NUM_TRAIN], targets[:_NUM_TRAIN], inputs[_NUM_TRAIN:], targets[_NUM_TRAIN:]
    )


@torch.no_grad()
def _accuracy(model: nn.Module, data: Data) -> float:
    dtype = next(model.parameters()).dtype
    everything = torch.arange(len(data.test_targets))
    outputs: Tensor = model(data.test_inputs[everything].to(dtype))
    return float((outputs.argmax(1) == data.test_targets[everything]).double().mean())
