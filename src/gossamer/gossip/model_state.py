"""A warning on `model.state_dict()` while workers differ, and a copy of it that can be saved."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Generator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_log = logging.getLogger(__name__)


@final
class ModelState:
    """Logs a warning once when user code calls ``model.state_dict()``: it is one of many replicas.

    Args:
        model: the model.
        rank: the rank of this worker.
        num_workers: with one worker, there is no warning.
    """

    def __init__(self, model: nn.Module, rank: int, num_workers: int) -> None:
        self._model = model
        self._words = (
            f"model.state_dict() is rank {rank}'s replica, one of {num_workers} that differ; to "
            "save the average, call gossip.averaged_state_dict() on every rank, and to continue "
            "the run save with gossamer.Checkpoints"
        )
        self._silent = num_workers == 1
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._hook = inner.register_state_dict_post_hook(self)

    @torch.no_grad()
    def copy(self) -> dict[str, Any]:
        """Return the model's state in tensors with storage of their own.

        Parameters are views of buckets: a format that detects tied weights by shared storage, such
        as safetensors, would keep one tensor of each bucket.
        """
        with self.silent():
            state = self._model.state_dict()
        return {
            key: value.detach().clone(memory_format=torch.contiguous_format)
            if isinstance(value, Tensor)
            else copy.deepcopy(value)
            for key, value in state.items()
        }

    @contextlib.contextmanager
    def silent(self) -> Generator[None]:
        """Suppress the warning in a block that saves a replica on purpose."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def silence(self) -> None:
        """Suppress the warning from now on: gossip's own state is saved with the replica."""
        self._silent = True

    def remove_hook(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()

    def __call__(self, *_: object) -> None:
        """Run after ``model.state_dict()``."""
        if not self._silent:
            self._silent = True
            _log.warning(self._words)

    def __reduce__(self) -> tuple[Any, ...]:
        # The hook is copied and pickled with its model. There it becomes a function that does
        # nothing, which can be unpickled without gossamer.
        return getattr, (contextlib.nullcontext(), "__exit__")
