"""DenseNet-BC for CIFAR-10 (Huang et al., https://arxiv.org/abs/1608.06993)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def densenet100(num_classes: int = 10, growth: int = 12) -> nn.Module:
    """Return DenseNet-BC of depth 100 with growth rate 12, 769,162 parameters.

    Three blocks of 16 layers with bottlenecks (B); channels are halved between blocks (C).
    """
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for block in range(3):
        if block:
            halved = channels // 2
            layers += [*_norm_conv(channels, halved, 1), nn.AvgPool2d(2)]
            channels = halved
        for _ in range(16):
            layers.append(_Layer(channels, growth))
            channels += growth
    model = nn.Sequential(
        *layers,
        *(nn.BatchNorm2d(channels), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return model


class _Layer(nn.Module):
    """Adds channels, computed from all channels before, to those before."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_norm_conv(channels, 4 * growth, 1), *_norm_conv(4 * growth, growth, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.body(x)), 1)


def _norm_conv(channels: int, width: int, size: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, width, size, padding=size // 2, bias=False)
    return nn.BatchNorm2d(channels), nn.ReLU(), convolution
