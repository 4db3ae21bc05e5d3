"""Lightning's Trainer with gossip in the place of DDP."""

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
"""The ending of the folder beside a checkpoint of Lightning's that every worker's state is in."""


@final
class GossipStrategy(DDPStrategy):
    """A strategy for ``Trainer(strategy=GossipStrategy(...))``: DDP's processes, with gossip.

    Validation is of the average of all workers, and ``fit`` ends with it in every rank's module.
    Checkpoints have the average as their module; a folder beside each, named as the file with
    ``.gossip`` at its end, has every worker's state, from which ``ckpt_path`` continues.

    Args:
        decentralize: options of ``gossamer.decentralize``, such as ``{"topology": "ring"}``.
        **options: DDPStrategy's that are about processes, such as ``process_group_backend``.
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
        """The handle; there from when ``fit`` has made the optimizers."""
        if self._gossip is None:
            raise UserError(
                "gossip must have been started, got none so far; call trainer.fit() first, or use "
                "it in a hook of training"
            )
        return self._gossip

    # - Training

    def configure_ddp(self) -> None:
        """Leave out the wrapper."""

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
        """Tell the others what ended this rank."""
        super().on_exception(exception)
        self._average.pop_all()
        if self._is_open:
            self.gossip.__exit__(type(exception), exception, None)

    # - The average

    def on_validation_start(self) -> None:
        """Have the average in the module."""
        super().on_validation_start()
        if self._is_open:
            self._average.enter_context(self.gossip.averaged())
            self._validates = True

    def on_validation_end(self) -> None:
        """Have each worker's own parameters back."""
        self._average.close()
        self._validates = False
        super().on_validation_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the average. A collective call, as a checkpoint is made by all ranks."""
        if self._is_open:
            return self.gossip.averaged_state_dict()
        return super().lightning_module_state_dict()

    # - Every worker's state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint, and every worker's state beside it unless it is of weights only."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._is_open and "optimizer_states" in checkpoint:
            # Callbacks save at the end of a validation, inside of the average.
            validates = self._validates
            self._average.close()
            save_replicas(_beside(filepath), self.gossip, self._module, self.optimizers)
            if validates:
                self._average.enter_context(self.gossip.averaged())

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, and note where every worker's state is."""
        self._loaded_from = _beside(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizers' states, and then every worker's own."""
        super().load_optimizer_state_dict(checkpoint)
        restore_replicas(self._loaded_from, self.gossip, self._module, self.optimizers)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint with every worker's state."""
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
