"""The test samples of an evaluation: a fixed subset during training, all of them at the end."""

from __future__ import annotations

from functools import cached_property
from typing import final

import numpy as np
import torch

from gossamer.engine.spec import RunSpec
from gossamer.workloads import Data

_SEED = 0
"""Seed of the subset, the same in all runs, so that their curves are comparable."""


@final
class TestSamples:
    """The test samples of a run's evaluations.

    Args:
        spec: has the number of samples for evaluations during training.
        data: of its workload.
    """

    __test__ = False  # pytest takes the name for a test's

    def __init__(self, spec: RunSpec, data: Data) -> None:
        self._all = data
        self._num = spec.evaluate_samples

    def data(self, last: bool) -> Data:
        """Return the workload's data, with a subset of the test samples unless it is the last."""
        return self._all if self.num(last) is None else self._some

    def num(self, last: bool) -> int | None:
        """Return how many of the test samples there are; None for all."""
        return self._num if not last and 0 < self._num < len(self._all.test_targets) else None

    @cached_property
    def _some(self) -> Data:
        order = np.random.default_rng(_SEED).permutation(len(self._all.test_targets))
        return self._all.with_tests(torch.from_numpy(np.sort(order[: self._num])))
