"""A small network for grey images of 28 × 28 pixels."""

from __future__ import annotations

from torch import nn


def small_convnet(num_classes: int = 10) -> nn.Module:
    """Two convolutions with batch normalization, two linear layers; 206,970 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *(nn.Linear(32 * 7 * 7, 128), nn.ReLU()),
        nn.Linear(128, num_classes),
    )
