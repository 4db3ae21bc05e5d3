"""Hugging Face's Trainer with gossip in the place of DDP."""

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
"""The folder inside of a checkpoint of Trainer's that every worker's state is in."""


class GossipTrainer(Trainer):
    """Trainer, whose ``train()`` gossips, and ends with the average in every rank's model.

    ``evaluate``, ``predict`` and ``save_model`` are of the average of all workers while training.
    Checkpoints have the average as their model, and a folder with every worker's state, from which
    ``resume_from_checkpoint`` continues bit for bit.

    Args:
        *args: as Trainer's.
        decentralize: options of ``gossamer.decentralize``, such as ``{"topology": "ring"}``.
        **options: as Trainer's.
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
                "all ranks must take the same steps, got auto_find_batch_size, by which each would "
                "choose for itself; set per_device_train_batch_size"
            )
        self._around = _AroundTraining(self)
        self.add_callback(self._around)

    @property
    def gossip(self) -> Gossip:
        """The handle; there from when ``train()`` has made the optimizer."""
        if self._gossip is None:
            raise UserError(
                "gossip must have been started, got none so far; call train() first, or use it in "
                "a callback"
            )
        return self._gossip

    # - Training

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator that leaves out DDP, as its evaluation mode does."""
        super().create_accelerator_and_postprocess()
        refuse_other_wrappers(self.accelerator)
        self.accelerator.prepare_model = functools.partial(
            self.accelerator.prepare_model, evaluation_mode=True
        )

    def create_optimizer(self, *args: Any, **options: Any) -> Optimizer:
        """Make the optimizer, and decentralize the model with it."""
        optimizer = super().create_optimizer(*args, **options)
        if self._gossip is None or self._gossip.is_closed:
            # On its device before parameters move into buckets; later this call does nothing.
            self.accelerator.prepare_model(self._trained)
            self._gossip = decentralize(self._trained, _inside(optimizer), **self._options)
            if self.accelerator.scaler is not None:  # torch's skips a step on one rank alone
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
        """Evaluate the average. A collective call, as Trainer's is."""
        with self._averaged():
            return super().evaluate(*args, **options)

    def predict(self, *args: Any, **options: Any) -> Any:
        """Predict by the average. A collective call, as Trainer's is."""
        with self._averaged():
            return super().predict(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the average. A collective call: on every rank, of which one writes."""
        with self._averaged():
            super().save_model(*args, **options)

    @contextlib.contextmanager
    def _averaged(self) -> Generator[None]:
        """Have the average in the model; also where one of these calls makes another."""
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
    """What belongs to the moments when a trainer's loop begins, saves and ends."""

    def __init__(self, trainer: GossipTrainer) -> None:
        self._trainer = trainer
        self.resumed_from = ""

    def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        """Go on from every worker's state, when Trainer has loaded what it saved."""
        if self.resumed_from:
            folder = os.path.join(self.resumed_from, _REPLICAS)
            restore_replicas(folder, self._trainer.gossip, model, [_inside(optimizer)])

    def on_save(
        self, args: Any, state: Any, *_: Any, model: Any, optimizer: Any, **__: Any
    ) -> None:
        """Save every worker's state, when Trainer has made the folder and removed older ones."""
        if not args.save_only_model:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", _REPLICAS)
            save_replicas(folder, self._trainer.gossip, model, [_inside(optimizer)])

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Come last: whatever Trainer loaded at the end is what all ranks average."""
        self._trainer.gossip.finalize()


def _inside(optimizer: Any) -> Optimizer:
    """Return torch's optimizer from Accelerate's around it, which takes no hooks."""
    return getattr(optimizer, "optimizer", optimizer)
