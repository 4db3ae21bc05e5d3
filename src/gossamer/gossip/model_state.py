"""What `model.state_dict()` is while workers differ, and a copy of it that any file can hold."""

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
    """The state of one worker's model; says once, where others ask for it, that it is one of many.

    Args:
        model: whose state.
        rank: of the worker.
        num_workers: where there is one, its state is the model's, and nothing is said.
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
        """Return the model's state in tensors that share memory with nothing.

        Parameters are views of buckets: a format that takes shared memory for tied weights would
        keep one of each bucket.
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
        """Say nothing in a block that knows whose state it is."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def silence(self) -> None:
        """Say nothing any more: what belongs to a replica's state is being saved with it."""
        self._silent = True

    def remove_hook(self) -> None:
        """Let the model's state be its own again."""
        self._hook.remove()

    def __call__(self, *_: object) -> None:
        """Come after ``model.state_dict()``."""
        if not self._silent:
            self._silent = True
            _log.warning(self._words)

    def __reduce__(self) -> tuple[Any, ...]:
        # A hook goes with its model into copies and pickles, which are no replicas: there it is a
        # function that does nothing, and needs no gossamer to be loaded.
        return getattr, (contextlib.nullcontext(), "__exit__")
