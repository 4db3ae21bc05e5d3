"""Lightning's Trainer with gossip instead of DDP."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, final

from torch import nn

from gossamer.errors import UserError
from gossamer.extras import needed_by
from gossamer.frameworks.replicas import restore_replicas, save_replicas
from gossamer.gossip import Gossip, decentralize

with needed_by("GossipStrategy needs", "lightning"):
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn

_REPLICAS = ".gossip"
"""The suffix of the folder beside a checkpoint of Lightning's that holds every worker's state."""


@final
class GossipStrategy(DDPStrategy):
    """A strategy for ``Trainer(strategy=GossipStrategy(...))``: DDP's processes, with gossip.

    Validation runs on the average of all workers, and ``fit`` leaves it in every rank's module.
    Checkpoints have the average as their module. A folder beside each, with the file's name and
    the suffix ``.gossip``, has every worker's state, from which ``ckpt_path`` resumes.

    Args:
        decentralize: options of ``gossamer.decentralize``, such as ``{"topology": "ring"}``.
        **options: DDPStrategy's options of processes, such as ``process_group_backend``.
    """

    strategy_name = "gossip"

    def __init__(self, *, decentralize: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._options = decentralize or {}
        self._gossip: Gossip | None = None
        self._average = contextlib.ExitStack()
        self._validates = False
        self._loaded_from = ""

    @property
    def gossip(self) -> Gossip:
        """The handle; available after ``fit`` has created the optimizers."""
        if self._gossip is None:
            raise UserError(
                "gossip must have been started, got none so far; call trainer.fit() first, or use "
                "it in a hook of training"
            )
        return self._gossip

    # - Training

    def configure_ddp(self) -> None:
        """Do not wrap the module in DDP."""

    def setup(self, trainer: Trainer) -> None:
        """Set up as DDP does, and decentralize the module with its optimizers."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._gossip = decentralize(self._module, self.optimizers, **self._options)

    def on_train_end(self) -> None:
        """Leave the average in every rank's module."""
        super().on_train_end()
        self.gossip.finalize()

    def on_exception(self, exception: BaseException) -> None:
        """Report the exception to the other ranks."""
        super().on_exception(exception)
        self._average.pop_all()
        if self._is_open:
            self.gossip.__exit__(type(exception), exception, None)

    # - The average

    def on_validation_start(self) -> None:
        """Load the average into the module."""
        super().on_validation_start()
        if self._is_open:
            self._average.enter_context(self.gossip.averaged())
            self._validates = True

    def on_validation_end(self) -> None:
        """Restore each worker's own parameters."""
        self._average.close()
        self._validates = False
        super().on_validation_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the average. A collective call: all ranks save a checkpoint."""
        if self._is_open:
            return self.gossip.averaged_state_dict()
        return super().lightning_module_state_dict()

    # - Every worker's state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint, and every worker's state beside it unless it has only weights."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._is_open and "optimizer_states" in checkpoint:
            # Callbacks save at the end of validation, while modules hold the average: without
            # restoring them first, all replicas would be saved as the average.
            validates = self._validates
            self._average.close()
            save_replicas(_beside(filepath), self.gossip, self._module, self.optimizers)
            if validates:
                self._average.enter_context(self.gossip.averaged())

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, and remember the folder of every worker's state."""
        self._loaded_from = _beside(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizers' states, and then overwrite them with every worker's own."""
        super().load_optimizer_state_dict(checkpoint)
        restore_replicas(self._loaded_from, self.gossip, self._module, self.optimizers)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, and every worker's state beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    @property
    def _is_open(self) -> bool:
        return self._gossip is not None and not self._gossip.is_closed

    @property
    def _module(self) -> nn.Module:
        module = self.lightning_module
        assert module is not None
        return module


def _beside(filepath: str | Path) -> str:
    return os.fspath(filepath) + _REPLICAS
