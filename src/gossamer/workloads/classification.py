"""Classification workloads: cross-entropy as the loss, accuracy as the metric."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gossamer.workloads.evaluation import accuracy
from gossamer.workloads.workload import Data, Recipe, Transform, Workload, as_they_are


def classification(  # noqa: PLR0913 - one parameter per field
    name: str,
    *,
    version: int,
    num_train: int,
    make_model: Callable[[], nn.Module],
    load: Callable[[], Data],
    transform: Transform = as_they_are,
    evaluation_batch: int = 500,
    target: float,
    recipe: Recipe,
) -> Workload:
    """Return a classification workload; see `Workload` for the fields.

    Args:
        name: of the workload.
        version: increased when new results are not comparable with older ones.
        num_train: training samples, as published.
        make_model: makes a model with one output per class.
        load: reads the data.
        transform: from stored samples to model inputs, in training (of all workers at once, with a
            random generator for each) and in evaluation.
        evaluation_batch: test samples in one forward pass.
        target: the accuracy that counts as trained.
        recipe: how it is trained.
    """
    return Workload(
        name=name,
        version=version,
        num_train=num_train,
        make_model=make_model,
        load=load,
        loss=nn.functional.cross_entropy,
        transform=transform,
        metric_name="accuracy",
        evaluate=accuracy(transform, evaluation_batch),
        target=target,
        recipe=recipe,
    )
