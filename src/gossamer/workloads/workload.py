"""The parts of a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.errors import UserError

Options: TypeAlias = dict[str, float | bool | tuple[float, ...]]

_SPLIT_SEED = 0
"""Seed of the validation split, the same in all runs whatever their seed."""


class Samples(Protocol):
    """Samples that are fetched by index: a tensor, or files that are read lazily.

    ``samples[chosen]`` is a tensor with the shape of ``chosen`` before that of one sample.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, chosen: Tensor, /) -> Tensor: ...


@final
@dataclass(frozen=True, slots=True)
class Data:
    """Training and test data of a workload."""

    train_inputs: Samples
    train_targets: Samples
    test_inputs: Samples
    test_targets: Samples
    labels: Tensor | None = None
    """The class of each training sample, where there are classes: for skewed shards."""

    test_samples: Tensor | None = None
    """Which of the published test samples are here; None for all of them."""

    validation: bool = False
    """Whether the test samples are a validation split of the training samples; ``test_samples`` are
    then their indices among those."""

    def with_tests(self, chosen: Tensor) -> Data:
        """Return the data with a subset of its test samples, by index."""
        return replace(
            self,
            test_inputs=_choose(self.test_inputs, chosen),
            test_targets=_choose(self.test_targets, chosen),
            test_samples=chosen if self.test_samples is None else self.test_samples[chosen],
        )

    def with_validation(self, share: float) -> Data:
        """Return the data with a validation split instead of the test samples.

        Args:
            share: fraction of the training samples to hold out; the same ones every time.
        """
        num = len(self.train_targets)
        held = round(share * num)
        if not 0 < held < num:
            raise UserError(
                f"a validation split needs a sample or more on both sides, got {held} of {num} "
                f"samples; choose another share than {share:g}"
            )
        order = torch.from_numpy(np.random.default_rng(_SPLIT_SEED).permutation(num))
        chosen, rest = order[:held].sort().values, order[held:].sort().values
        return Data(
            _choose(self.train_inputs, rest),
            _choose(self.train_targets, rest),
            _choose(self.train_inputs, chosen),
            _choose(self.train_targets, chosen),
            None if self.labels is None else self.labels[rest],
            test_samples=chosen,
            validation=True,
        )


@final
@dataclass(frozen=True, slots=True)
class _Chosen:
    """A subset of samples, fetched lazily."""

    samples: Samples
    chosen: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, chosen: Tensor, /) -> Tensor:
        return self.samples[self.chosen[chosen]]


def _choose(samples: Samples, chosen: Tensor) -> Samples:
    return samples[chosen] if isinstance(samples, Tensor) else _Chosen(samples, chosen)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The default hyperparameters of a workload, which a run may override."""

    optimizer: str
    """A name in ``engine.OPTIMIZERS``."""

    optimizer_options: Options
    lr: float
    """At ``reference_batch`` samples per averaging neighbourhood, where it is scaled."""

    lr_schedule: str
    """A name in ``engine.LR_SCHEDULES``."""

    lr_scaling: str = "none"
    """A name in ``engine.LR_SCALINGS``."""

    reference_batch: int = 256
    warmup_epochs: float = 0.0
    """During which the learning rate rises linearly."""

    batch_size: int
    """Samples per worker and step."""

    epochs: int
    steps_per_epoch: int | None = None
    """The same for any number of workers; by default one pass of all workers over the samples."""

    sharding: str = "iid"
    """As ``workloads.parse_sharding`` takes it."""

    evaluate_samples: int = 0
    """Test samples of an evaluation during training; 0 for all. As many as keep evaluations below a
    tenth of a run (``benchmarks.evaluation``); the last one always uses all of them."""


Generators: TypeAlias = Callable[[], Sequence[np.random.Generator]]
"""Makes one generator per worker. A function, because many take longer than small samples."""

Transform: TypeAlias = Callable[[Tensor, Generators | None], Tensor]


def as_they_are(inputs: Tensor, generators: Generators | None) -> Tensor:
    """The identity, for samples that a model takes as they are stored."""
    return inputs


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything about a training task but how it is distributed."""

    name: str
    version: int
    """Increased when new results are not comparable with older ones."""

    num_train: int
    """Number of training samples as published, known before the data are loaded."""

    make_model: Callable[[], nn.Module]
    """Draws initial parameters from torch's generator, which the caller has seeded."""

    load: Callable[[], Data]
    """Reads the data, once per process; raises a UserError that says how to get missing ones."""

    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean over a batch, of outputs and targets."""

    transform: Transform = as_they_are
    """From stored samples to model inputs. With generators, [workers, batch, ...] for training, of
    which each worker's are augmented by its own; without, [batch, ...] for evaluation."""

    metric_name: str
    higher_is_better: bool = True
    evaluate: Callable[[nn.Module, Data], float]
    """The metric of a model on the test data; the model is in eval mode. A ``MeanMetric`` can
    evaluate several models at once."""

    target: float | None = None
    """The metric that counts as trained, for time and bytes to it."""

    recipe: Recipe
