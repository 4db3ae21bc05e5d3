"""Small images with ten classes: Fashion-MNIST and CIFAR-10.

Images are stored as bytes; ``transform`` converts a batch to normalized floats. The formats are a
header and bytes, read here: torchvision's readers would pin users to its matching torch, and check
neither sizes nor labels.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import UserError
from gossamer.workloads.classification import classification
from gossamer.workloads.files import DataFiles, data_folder
from gossamer.workloads.models.convnet import small_convnet
from gossamer.workloads.models.densenet import densenet100
from gossamer.workloads.models.resnet import resnet20, small_resnet
from gossamer.workloads.workload import Data, Generators, Options, Recipe, Workload

_PADDING = 1 / 8
"""The most that a crop is shifted, relative to the size: 4 pixels of CIFAR-10's."""

_NESTEROV: Options = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}


def fashion_mnist_cnn(width: int = 16) -> Workload:
    """Clothes, grey, 28 × 28 pixels; a network of 206,970 parameters, or a thinner one.

    Args:
        width: channels of the first convolution, to which the other layers are in proportion.
    """
    _check_width("fashion-mnist-cnn", width)
    return classification(
        "fashion-mnist-cnn" if width == 16 else f"fashion-mnist-cnn(width={width})",
        version=1,
        num_train=60_000,
        make_model=partial(small_convnet, width=width),
        load=lambda: _fashion_mnist(data_folder()),
        transform=_fashion_floats,
        target=0.9,
        recipe=Recipe(
            optimizer="sgd",
            optimizer_options=_NESTEROV,
            lr=0.05,
            lr_schedule="cosine",
            batch_size=32,
            epochs=15,
            evaluate_samples=1000,
        ),
    )


def cifar10_resnet20() -> Workload:
    """ResNet-20 on CIFAR-10, as in consensus control's experiments."""
    return _cifar10_workload("cifar10-resnet20", resnet20, target=0.91, reference_batch=128)


def cifar10_resnet8(width: int = 8, pixels: int = 32) -> Workload:
    """The network of ResNet-20's kind with 8 layers, for machines without accelerators.

    Args:
        width: channels of the first convolution; ResNet-20 has 16.
        pixels: to which images are made smaller by averages, 32, 16 or 8; 16 take a fourth of the
            time.
    """
    _check_width("cifar10-resnet8", width)
    if pixels not in (8, 16, 32):
        raise UserError(f"cifar10-resnet8 needs pixels of 8, 16 or 32, got {pixels}; use 16")
    size = "" if pixels == 32 else f", pixels={pixels}"
    return _cifar10_workload(
        f"cifar10-resnet8(width={width}{size})",
        partial(small_resnet, 1, width),
        load=lambda: _cifar10(data_folder(), pixels),
        target=0.6,
        reference_batch=128,
        epochs=30,
    )


def _check_width(name: str, width: int) -> None:
    if not 1 <= width <= 256:
        raise UserError(f"{name} needs a width of 1 to 256, got {width}; use 8")


def cifar10_densenet100() -> Workload:
    """DenseNet-100-BC on CIFAR-10, one of DBench's applications."""
    return _cifar10_workload("cifar10-densenet100", densenet100, target=0.94, reference_batch=64)


def _cifar10_workload(
    name: str,
    make_model: Callable[[], nn.Module],
    load: Callable[[], Data] = lambda: _cifar10(data_folder()),
    *,
    target: float,
    reference_batch: int,
    epochs: int = 300,
) -> Workload:
    return classification(
        name,
        version=1,
        num_train=50_000,
        make_model=make_model,
        load=load,
        transform=cifar_floats,
        target=target,
        recipe=Recipe(
            optimizer="sgd",
            optimizer_options=_NESTEROV,
            lr=0.1,
            lr_schedule="steps",
            lr_scaling="linear",
            reference_batch=reference_batch,
            warmup_epochs=epochs / 60,
            batch_size=32,
            epochs=epochs,
            evaluate_samples=1000,
        ),
    )


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return bytes [..., C, H, W] as floats whose channels have about mean 0 and deviation 1."""
    shift, scale = (torch.tensor(channel).view(-1, 1, 1) for channel in (mean, std))
    return images.float().sub_(255 * shift).div_(255 * scale)


def _fashion_floats(images: Tensor, _generators: Generators | None) -> Tensor:
    return normalize(images, (0.2860,), (0.3530,))


def cifar_floats(images: Tensor, generators: Generators | None) -> Tensor:
    """Return floats; in training randomly shifted by up to an eighth, half of them flipped."""
    if generators is not None:
        images = _moved(images, generators())
    return normalize(images, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def _moved(images: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
    """Return images [workers, batch, C, H, W] moved, half of them flipped, by each worker's draws.

    All crops are gathered at once from strided views of all positions.
    """
    num, size = images.shape[1], images.shape[-1]
    padding = int(size * _PADDING)
    draws = [(g.integers(2 * padding + 1, size=(2, num)), g.random(num)) for g in generators]
    top, left = torch.from_numpy(np.concatenate([places for places, _ in draws], axis=1))
    flipped = torch.from_numpy(np.concatenate([chances for _, chances in draws]) < 0.5)
    every = images.flatten(0, 1)
    places = F.pad(every, (padding,) * 4).unfold(2, size, 1).unfold(3, size, 1)
    moved = places[torch.arange(len(every)), :, top, left]
    return torch.where(flipped[:, None, None, None], moved.flip(-1), moved).view_as(images)


@cache
def _fashion_mnist(folder: Path) -> Data:
    return read_fashion_mnist(folder)


def read_fashion_mnist(folder: Path, num_train: int = 60_000, num_test: int = 10_000) -> Data:
    """Read the published files: images and labels in IDX format, compressed."""
    files = DataFiles("fashion-mnist", folder)
    train, labels = _read_idx(files, "train", num_train)
    test, test_labels = _read_idx(files, "t10k", num_test)
    return Data(train, labels, test, test_labels, labels)


def _read_idx(files: DataFiles, part: str, num: int) -> tuple[Tensor, Tensor]:
    arrays: list[Tensor] = []
    # IDX: a magic number that ends in the number of dimensions, their sizes, the bytes.
    for kind, shape in (("images-idx3", (num, 28, 28)), ("labels-idx1", (num,))):
        name = f"fashion-mnist/{part}-{kind}-ubyte.gz"
        contents = files.read_gzip(name)
        header = struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)
        size = len(header) + int(np.prod(shape))
        if not contents.startswith(header) or len(contents) != size:
            what = " × ".join(map(str, shape))
            raise files.damaged(
                name,
                f"an IDX header of {what} bytes and so many bytes",
                f"{len(contents):,} bytes that begin {contents[:16].hex(' ')}",
            )
        array = np.frombuffer(contents, np.uint8, offset=len(header)).reshape(shape)
        arrays.append(torch.from_numpy(array.copy()))
    images, labels = arrays
    _check_labels(files, f"fashion-mnist/{part}-labels-idx1-ubyte.gz", labels)
    return images.unsqueeze(1), labels.long()


@cache
def _cifar10(folder: Path, pixels: int = 32) -> Data:
    return read_cifar10(folder, pixels=pixels)


def read_cifar10(folder: Path, per_file: int = 10_000, pixels: int = 32) -> Data:
    """Read the binary version: per image a byte for its label, then red, green and blue planes.

    Args:
        folder: of the data.
        per_file: images in each of the six files.
        pixels: of the images that are returned; of fewer than 32, each is the mean of those in its
            place.
    """
    files = DataFiles("cifar10", folder)
    images: list[Tensor] = []
    labels: list[Tensor] = []
    for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        name = f"cifar-10-batches-bin/{part}.bin"
        contents = files.read(name, per_file * 3073)
        rows = torch.from_numpy(np.frombuffer(contents, np.uint8).reshape(per_file, 3073).copy())
        _check_labels(files, name, rows[:, 0])
        images.append(_smaller(rows[:, 1:].reshape(-1, 3, 32, 32), pixels))
        labels.append(rows[:, 0].long())
    train, train_labels = torch.cat(images[:5]), torch.cat(labels[:5])
    return Data(train, train_labels, images[5], labels[5], train_labels)


def _smaller(images: Tensor, pixels: int) -> Tensor:
    if pixels == images.shape[-1]:
        return images
    return F.avg_pool2d(images.float(), images.shape[-1] // pixels).round_().to(torch.uint8)


def _check_labels(files: DataFiles, name: str, labels: Tensor) -> None:
    if int(labels.max()) > 9:
        raise files.damaged(name, "labels of 0 to 9", str(int(labels.max())))
