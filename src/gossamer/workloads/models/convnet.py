"""A small network for grey images of 28 × 28 pixels."""

from __future__ import annotations

from torch import nn


def small_convnet(num_classes: int = 10, width: int = 16) -> nn.Module:
    """Two convolutions with batch normalization, two linear layers; 206,970 parameters.

    Args:
        num_classes: outputs.
        width: channels of the first convolution, to which those of the other layers are in
            proportion.
    """
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *(nn.Linear(2 * width * 7 * 7, 8 * width), nn.ReLU()),
        nn.Linear(8 * width, num_classes),
    )
