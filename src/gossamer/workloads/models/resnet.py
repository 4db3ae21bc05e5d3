"""Residual networks (He et al., https://arxiv.org/abs/1512.03385): ResNet-20 and ResNet-50.

ResNet-20 is the network for CIFAR-10, whose shortcuts have no parameters (option A); ResNet-50 is
the one for ImageNet, with strides in the 3 × 3 convolutions, as all current ones have them.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def resnet20(num_classes: int = 10) -> nn.Module:
    """Return ResNet-20 for images of 32 × 32 pixels, 269,722 parameters."""
    return small_resnet(3, 16, num_classes)


def small_resnet(depth: int, width: int, num_classes: int = 10) -> nn.Module:
    """Return the network for small images with 6 · depth + 2 layers.

    Args:
        depth: blocks of two convolutions for each of three sizes of the image.
        width: channels in the first blocks; they double where the image is halved.
        num_classes: outputs.
    """
    blocks: list[nn.Module] = []
    channels = width
    for wider in (width, 2 * width, 4 * width):
        for _ in range(depth):
            blocks.append(_Basic(channels, wider))
            channels = wider
    return _initialized(
        nn.Sequential(
            *(_conv(3, width, 3), nn.BatchNorm2d(width), nn.ReLU()),
            *blocks,
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)),
        )
    )


def resnet50(num_classes: int = 1000) -> nn.Module:
    """Return ResNet-50 for images of 224 × 224 pixels, 25,557,032 parameters."""
    blocks: list[nn.Module] = []
    channels = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(depth):
            stride = 2 if i == 0 and width > 64 else 1
            blocks.append(_Bottleneck(channels, width, stride))
            channels = 4 * width
    return _initialized(
        nn.Sequential(
            *(_conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *blocks,
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)),
        )
    )


class _Basic(nn.Module):
    """Two convolutions; where channels double, the shortcut is every second pixel and zeros."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self._stride = width // channels
        self._missing = width - channels
        self.body = nn.Sequential(
            *(_conv(channels, width, 3, self._stride), nn.BatchNorm2d(width), nn.ReLU()),
            *(_conv(width, width, 3), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self._missing:
            every = x[:, :, :: self._stride, :: self._stride]
            half = self._missing // 2
            shortcut = F.pad(every, (0, 0, 0, 0, half, self._missing - half))
        return F.relu(self.body(x) + shortcut)


class _Bottleneck(nn.Module):
    """Convolutions of 1 × 1, 3 × 3 and 1 × 1; the shortcut is projected where shapes differ."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(_conv(channels, width, 1), nn.BatchNorm2d(width), nn.ReLU()),
            *(_conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU()),
            *(_conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)),
        )
        self.shortcut = nn.Sequential()
        if channels != 4 * width:
            self.shortcut.append(_conv(channels, 4 * width, 1, stride))
            self.shortcut.append(nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(channels: int, width: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)


def _initialized(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
