"""Workloads: a model, its data, a loss, a metric and a recipe; nothing about distribution."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.registry import Registry
from gossamer.workloads import (
    bytes_of_text,
    digits,
    imagenet,
    images,
    multi30k,
    quadratic,
    wikitext,
)
from gossamer.workloads.files import data_folder
from gossamer.workloads.sharding import SHARDING_REGISTRY, Draw, draw_batches, parse_sharding
from gossamer.workloads.sources import download
from gossamer.workloads.workload import Data, Recipe, Samples, Workload

__all__ = [
    "SHARDING_REGISTRY",
    "WORKLOADS",
    "WORKLOAD_REGISTRY",
    "Data",
    "Draw",
    "Recipe",
    "Samples",
    "Workload",
    "data_folder",
    "download",
    "draw_batches",
    "find",
    "parse_sharding",
]

# A new workload is one function and one row here: parsing, the command line and the tests of what
# all workloads have in common read this table.
WORKLOADS: dict[str, Callable[..., Workload]] = {
    "quadratic": quadratic.quadratic,
    "digits-mlp": digits.mlp,
    "digits-cnn": digits.cnn,
    "stdlib-gpt": bytes_of_text.stdlib_gpt,
    "fashion-mnist-cnn": images.fashion_mnist_cnn,
    "cifar10-resnet8": images.cifar10_resnet8,
    "cifar10-resnet20": images.cifar10_resnet20,
    "cifar10-densenet100": images.cifar10_densenet100,
    "imagenet-resnet50": imagenet.imagenet_resnet50,
    "wikitext2-lstm": wikitext.wikitext2_lstm,
    "shakespeare-gpt": bytes_of_text.shakespeare_gpt,
    "multi30k-transformer": multi30k.multi30k_transformer,
}


WORKLOAD_REGISTRY: Registry[Workload] = Registry(
    kind="workload",
    table=WORKLOADS,
    group="gossamer.workloads",
    example="digits-mlp",
    makes=(Workload,),
)


def find(text: str) -> Workload:
    """Return the workload that a string names."""
    return WORKLOAD_REGISTRY.parse(text).make()
