"""Workers' batches, as a model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.engine.spec import DTYPES, RunSpec
from gossamer.workloads import Draw, draw_batches

_AUGMENT = 2
"""A random stream distinct from those of ``workloads.sharding``."""


@final
class Batches:
    """The training batches of some workers of a run."""

    def __init__(self, spec: RunSpec, workers: Sequence[int]) -> None:
        self._workers = workers
        self.data = spec.load_data()
        self._transform = spec.make_workload().transform
        self._dtype = DTYPES[spec.dtype]
        self._seed = spec.seed
        self._draw = Draw(
            num_samples=len(self.data.train_inputs),
            num_workers=spec.workers,
            batch_size=spec.batch_size,
            steps_per_epoch=spec.steps_per_epoch,
            seed=spec.seed,
            sharding=spec.sharding,
            labels=None if self.data.labels is None else self.data.labels.numpy(),
        )

    def draw(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the indices of the samples of an epoch, [workers, steps, batch]."""
        return draw_batches(self._draw, self._workers, epoch)

    def fetch(self, samples: npt.NDArray[np.int64], step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one step, [workers, batch, ...].

        A worker's augmentation depends only on the seed, the worker and the step.
        """
        chosen = torch.from_numpy(samples)
        stored, targets = self.data.train_inputs[chosen], self.data.train_targets[chosen]

        def generators() -> list[np.random.Generator]:
            return [np.random.default_rng((self._seed, _AUGMENT, w, step)) for w in self._workers]

        return _cast(self._transform(stored, generators), self._dtype), targets


def _cast(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return inputs in a run's precision; integer tensors, such as tokens, are unchanged."""
    return inputs.to(dtype) if inputs.is_floating_point() else inputs
