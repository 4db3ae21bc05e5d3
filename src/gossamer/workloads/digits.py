"""Handwritten digits, 8 × 8 pixels, 10 classes: real data that comes with scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from gossamer.extras import needed_by
from gossamer.workloads.classification import classification
from gossamer.workloads.workload import Data, Recipe, Workload

_NUM_TRAIN = 1500
"""Of 1797; the rest are test samples."""


def mlp() -> Workload:
    """A network with one hidden layer, 9,610 parameters."""
    return _digits("digits-mlp", _mlp, lr=0.1)


def cnn() -> Workload:
    """Two convolutions with group normalization, 6,138 parameters."""
    return _digits("digits-cnn", _convnet, lr=0.03, evaluate_samples=75)


def _digits(
    name: str, make_model: Callable[[], nn.Module], lr: float, evaluate_samples: int = 0
) -> Workload:
    return classification(
        name,
        version=1,
        num_train=_NUM_TRAIN,
        make_model=make_model,
        load=_load,
        target=0.9,
        recipe=Recipe(
            optimizer="sgd",
            optimizer_options={"momentum": 0.9, "nesterov": True},
            lr=lr,
            lr_schedule="cosine",
            batch_size=16,
            epochs=10,
            steps_per_epoch=25,
            evaluate_samples=evaluate_samples,
        ),
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.GroupNorm(4, 32), nn.ReLU()),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


@cache
def _load() -> Data:
    with needed_by("the digits need"):
        from sklearn.datasets import load_digits
    features, classes = load_digits(return_X_y=True)
    inputs = torch.tensor(features / 16, dtype=torch.float32)
    targets = torch.tensor(classes)
    return Data(
        inputs[:_NUM_TRAIN],
        targets[:_NUM_TRAIN],
        inputs[_NUM_TRAIN:],
        targets[_NUM_TRAIN:],
        labels=targets[:_NUM_TRAIN],
    )
