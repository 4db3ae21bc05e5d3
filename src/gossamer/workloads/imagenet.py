"""ImageNet-1K as a folder of images per class, decoded lazily."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.errors import UserError
from gossamer.extras import needed_by
from gossamer.workloads.classification import classification
from gossamer.workloads.files import data_folder
from gossamer.workloads.images import normalize
from gossamer.workloads.models.resnet import resnet50
from gossamer.workloads.workload import Data, Generators, Recipe, Workload

_STORED, _CROP = 256, 224
_NUM_TRAIN, _NUM_TEST, _NUM_CLASSES = 1_281_167, 50_000, 1000
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def imagenet_resnet50() -> Workload:
    """ResNet-50 on ImageNet-1K, one of DBench's applications."""
    return classification(
        "imagenet-resnet50",
        version=1,
        num_train=_NUM_TRAIN,
        make_model=resnet50,
        load=lambda: _imagenet(data_folder()),
        transform=imagenet_floats,
        evaluation_batch=50,
        target=0.75,
        recipe=Recipe(
            optimizer="sgd",
            optimizer_options={"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
            lr=0.1,
            lr_schedule="cosine",
            lr_scaling="linear",
            reference_batch=256,
            warmup_epochs=5,
            batch_size=32,
            epochs=90,
            evaluate_samples=5000,
        ),
    )


def imagenet_floats(images: Tensor, generators: Generators | None) -> Tensor:
    """Return floats of 224 × 224 pixels: centre crops, or in training random resized ones."""
    if generators is not None:
        each = zip(images, generators(), strict=True)
        return normalize(torch.stack([_resized(*own) for own in each]), _MEAN, _STD)
    edge = (_STORED - _CROP) // 2
    return normalize(images[..., edge : edge + _CROP, edge : edge + _CROP], _MEAN, _STD)


def _resized(images: Tensor, generator: np.random.Generator) -> Tensor:
    """Return a worker's random crops, half of them flipped, resampled at once.

    A crop has 8 % to 100 % of the area and an aspect ratio of 3:4 to 4:3, as in the usual recipe,
    here of the stored 256 × 256 pixels.
    """
    num = len(images)
    area = generator.uniform(0.08, 1.0, num)
    ratio = np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3), num))
    # In the coordinates of affine_grid: the image extends from -1 to 1.
    width, height = np.minimum(1, np.sqrt(area * ratio)), np.minimum(1, np.sqrt(area / ratio))
    x, y = generator.uniform(-1, 1, (2, num)) * (1 - np.stack((width, height)))
    mirror = np.where(generator.random(num) < 0.5, -1, 1)
    zero = np.zeros(num)
    rows = np.stack((width * mirror, zero, x, zero, height, y), 1).reshape(num, 2, 3)
    theta = torch.from_numpy(rows).float()
    grid = F.affine_grid(theta, [num, 3, _CROP, _CROP], align_corners=False)
    return F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)


@final
class ImageFiles:
    """Images that are decoded lazily, by several threads.

    An image's shorter side is resized to 256 pixels, then the centre 256 × 256 are cropped.

    Args:
        paths: of the images.
        threads: that decode; by default as many as torch has.
    """

    def __init__(self, paths: Sequence[Path], threads: int | None = None) -> None:
        self._paths = paths
        self._threads = threads or torch.get_num_threads()

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        paths = [self._paths[i] for i in chosen.flatten().tolist()]
        with ThreadPoolExecutor(self._threads) as pool:
            images = list(pool.map(_decode, paths))
        stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
        return stacked.view(*chosen.shape, *stacked.shape[1:])


def _decode(path: Path) -> npt.NDArray[np.uint8]:
    with needed_by("images need"):
        from PIL import Image
    try:
        with Image.open(path) as image:
            image.draft("RGB", (_STORED, _STORED))  # decodes JPEG at about the size needed
            scale = _STORED / min(image.size)
            size = [max(_STORED, round(side * scale)) for side in image.size]
            whole = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    except OSError as error:
        raise UserError(
            f"{path} must be a readable image, got {error}; download that file again"
        ) from error
    left, top = ((side - _STORED) // 2 for side in size)
    return np.asarray(whole.crop((left, top, left + _STORED, top + _STORED)))


@cache
def _imagenet(folder: Path) -> Data:
    return read_imagenet(folder)


def read_imagenet(
    folder: Path,
    num_train: int = _NUM_TRAIN,
    num_test: int = _NUM_TEST,
    num_classes: int = _NUM_CLASSES,
) -> Data:
    """Find images in ``imagenet/train/CLASS`` and ``imagenet/val/CLASS``; decode none."""
    train, labels, names = _list_images(folder, "train", num_train)
    test, test_labels, test_names = _list_images(folder, "val", num_test)
    if len(names) != num_classes or names != test_names:
        raise UserError(
            f"{folder / 'imagenet'} must have the same {num_classes} classes in train and val, got "
            f"{len(names)} and {len(test_names)}; unpack the archives of ImageNet again"
        )
    return Data(ImageFiles(train), labels, ImageFiles(test), test_labels, labels)


def _list_images(data: Path, part: str, num: int) -> tuple[list[Path], Tensor, list[str]]:
    folder = data / "imagenet" / part
    if not folder.is_dir():
        raise UserError(
            f"imagenet needs the folder imagenet/{part} with a folder of images per class, which "
            f"is not in {data}; register at https://image-net.org, unpack it there, and "
            "set GOSSAMER_DATA or --data-dir to that folder"
        )
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        own = sorted(path for path in (folder / name).iterdir() if path.is_file())
        paths += own
        labels += [label] * len(own)
    if len(paths) != num:
        raise UserError(
            f"{folder} must hold {num:,} images in folders of classes, got {len(paths):,}; "
            "unpack the archives of ImageNet again"
        )
    return paths, torch.tensor(labels), names
