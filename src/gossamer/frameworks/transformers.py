"""Hugging Face's Trainer with gossip instead of DDP."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Generator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.errors import UserError
from gossamer.extras import needed_by
from gossamer.frameworks.accelerate import refuse_other_wrappers
from gossamer.frameworks.replicas import restore_replicas, save_replicas
from gossamer.gossip import Gossip, GradScaler, decentralize

with needed_by("GossipTrainer needs", "transformers"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

_REPLICAS = "gossip"
"""The folder inside of a checkpoint of Trainer's that holds every worker's state."""


class GossipTrainer(Trainer):
    """A Trainer whose ``train()`` gossips, and leaves the average in every rank's model.

    During training, ``evaluate``, ``predict`` and ``save_model`` use the average of all workers.
    Checkpoints have the average as their model, and a folder with every worker's state, from which
    ``resume_from_checkpoint`` resumes bit for bit.

    Args:
        *args: those of Trainer.
        decentralize: options of ``gossamer.decentralize``, such as ``{"topology": "ring"}``.
        **options: those of Trainer.
    """

    def __init__(
        self, *args: Any, decentralize: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self._options = decentralize or {}
        self._gossip: Gossip | None = None
        self._averages = False
        super().__init__(*args, **options)
        if self.args.auto_find_batch_size:
            raise UserError(
                "all ranks must take the same steps, got auto_find_batch_size, which chooses on "
                "each rank by itself; set per_device_train_batch_size"
            )
        self._around = _AroundTraining(self)
        self.add_callback(self._around)

    @property
    def gossip(self) -> Gossip:
        """The handle; available after ``train()`` has created the optimizer."""
        if self._gossip is None:
            raise UserError(
                "gossip must have been started, got none so far; call train() first, or use it in "
                "a callback"
            )
        return self._gossip

    # - Training

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that does not wrap models in DDP, as in its evaluation mode."""
        super().create_accelerator_and_postprocess()
        refuse_other_wrappers(self.accelerator)
        self.accelerator.prepare_model = functools.partial(
            self.accelerator.prepare_model, evaluation_mode=True
        )

    def create_optimizer(self, *args: Any, **options: Any) -> Optimizer:
        """Create the optimizer, and decentralize the model with it."""
        optimizer = super().create_optimizer(*args, **options)
        if self._gossip is None or self._gossip.is_closed:
            # Moved to its device before its parameters move into buckets: .to() would replace them.
            # Trainer's own call later does nothing.
            self.accelerator.prepare_model(self._trained)
            self._gossip = decentralize(self._trained, _inside(optimizer), **self._options)
            if self.accelerator.scaler is not None:  # torch's would skip a step on one rank only
                self.accelerator.scaler = GradScaler(self._gossip)
        return optimizer

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any
    ) -> Any:
        """Train, and leave the average in every rank's model."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
        self._around.resumed_from = resume_from_checkpoint or ""
        return super().train(resume_from_checkpoint or None, *args, **options)

    # - The average

    def evaluate(self, *args: Any, **options: Any) -> Any:
        """Evaluate the average. A collective call, as in Trainer."""
        with self._averaged():
            return super().evaluate(*args, **options)

    def predict(self, *args: Any, **options: Any) -> Any:
        """Predict with the average. A collective call, as in Trainer."""
        with self._averaged():
            return super().predict(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the average. A collective call on all ranks, one of which writes."""
        with self._averaged():
            super().save_model(*args, **options)

    @contextlib.contextmanager
    def _averaged(self) -> Generator[None]:
        """Load the average into the model during the block; nested blocks do nothing."""
        if self._gossip is None or self._gossip.is_closed or self._averages:
            yield
            return
        with self._gossip.averaged():
            self._averages = True
            try:
                yield
            finally:
                self._averages = False

    @property
    def _trained(self) -> nn.Module:
        assert self.model is not None
        return self.model


class _AroundTraining(TrainerCallback):
    """Callbacks at the start of the trainer's loop, when it saves, and at its end."""

    def __init__(self, trainer: GossipTrainer) -> None:
        self._trainer = trainer
        self.resumed_from = ""

    def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        """Resume from every worker's state, after Trainer has loaded its own checkpoint."""
        if self.resumed_from:
            folder = os.path.join(self.resumed_from, _REPLICAS)
            restore_replicas(folder, self._trainer.gossip, model, [_inside(optimizer)])

    def on_save(
        self, args: Any, state: Any, *_: Any, model: Any, optimizer: Any, **__: Any
    ) -> None:
        """Save every worker's state, after Trainer has created the folder and removed old ones."""
        if not args.save_only_model:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", _REPLICAS)
            save_replicas(folder, self._trainer.gossip, model, [_inside(optimizer)])

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Finalize last: the average must be of what Trainer has loaded at its end."""
        self._trainer.gossip.finalize()


def _inside(optimizer: Any) -> Optimizer:
    """Return torch's optimizer inside Accelerate's wrapper, which does not support hooks."""
    return getattr(optimizer, "optimizer", optimizer)
