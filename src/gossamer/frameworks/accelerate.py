"""Accelerate with gossip: ``prepare`` decentralizes a model instead of wrapping it in DDP."""

from __future__ import annotations

import os
from typing import Any, final

from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from gossamer.errors import UserError
from gossamer.extras import needed_by
from gossamer.frameworks.replicas import restore_replicas, save_replicas
from gossamer.gossip import Gossip, GradScaler, decentralize

with needed_by("GossipAccelerator needs", "accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

_REPLICAS = "gossip"
"""The folder inside of Accelerate's checkpoint that holds every worker's state."""

_WRAPPED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def refuse_other_wrappers(accelerator: Accelerator) -> None:
    """Raise if Accelerate is configured to shard the model."""
    if accelerator.distributed_type in _WRAPPED:
        raise UserError(
            "gossip needs a full replica per rank, as DDP does, got an accelerator that uses "
            f"{accelerator.distributed_type.value}; turn it off in the configuration of Accelerate"
        )


@final
class GossipAccelerator(Accelerator):
    """An Accelerator whose ``prepare(model, optimizer)`` decentralizes them.

    ``save_state`` saves the average, and every worker's state beside it; ``load_state`` resumes
    from these states. ``save_model`` and ``get_state_dict`` use the average. All of them are
    collective calls, as in Accelerate. ``gossip`` is the handle, for ``averaged()`` around
    evaluation.

    Args:
        decentralize: options of ``gossamer.decentralize``, such as ``{"topology": "ring"}``.
        **options: Accelerator's. Without a GPU, ``cpu=True`` is needed to start a process group.
    """

    def __init__(self, *, decentralize: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        refuse_other_wrappers(self)
        self._options = decentralize or {}
        self._gossip: Gossip | None = None
        self._trained: nn.Module | None = None
        self._trainers: list[Optimizer] = []
        self._loaded_from = ""
        self.register_save_state_pre_hook(self._save_replicas)
        self.register_load_state_pre_hook(self._load_average)

    @property
    def gossip(self) -> Gossip:
        """The handle; available after ``prepare`` of a model and its optimizers."""
        if self._gossip is None:
            raise UserError(
                "gossip must have been started, got none so far; call "
                "accelerator.prepare(model, optimizer) first"
            )
        return self._gossip

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerate does, and decentralize the model with its optimizers."""
        models = [thing for thing in args if isinstance(thing, nn.Module)]
        optimizers = [thing for thing in args if isinstance(thing, Optimizer)]
        if models or optimizers:
            self._decentralize(models, optimizers)
        return super().prepare(*args, device_placement=device_placement)

    def _decentralize(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        if len(models) != 1 or not optimizers or self._gossip is not None:
            raise UserError(
                "prepare must be called once with one model and all optimizers that train it, got "
                f"{len(models)} models and {len(optimizers)} optimizers"
                f"{' again' if self._gossip else ''}; a model that is not trained needs "
                "prepare_model(model, evaluation_mode=True)"
            )
        # Moved to its device before its parameters move into buckets: .to() would replace them.
        (self._trained,) = models
        self.prepare_model(self._trained)
        self._trainers = optimizers
        self._gossip = decentralize(self._trained, optimizers, **self._options)
        if self.scaler:  # torch's would skip a step on one rank only
            self.scaler = GradScaler(self._gossip)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = True,
    ) -> Any:
        """Prepare a model without DDP: evaluation mode leaves out the wrapper and nothing else."""
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the average of all workers, if the model is the one that gossips."""
        if model is self._trained and not self.gossip.is_closed:
            return self.gossip.averaged_state_dict()
        return super().get_state_dict(model, unwrap)

    def load_state(self, *args: Any, **options: Any) -> None:
        """Load a state, and every worker's own model and optimizer state."""
        if self._gossip is None:
            super().load_state(*args, **options)
            return
        with self._gossip.drained(keep_changes=True):
            super().load_state(*args, **options)
        assert self._trained is not None
        restore_replicas(self._loaded_from, self._gossip, self._trained, self._trainers)

    def _save_replicas(self, models: Any, weights: Any, output_dir: str) -> None:
        if self._trained is not None and not self.gossip.is_closed:
            folder = os.path.join(output_dir, _REPLICAS)
            save_replicas(folder, self.gossip, self._trained, self._trainers)

    def _load_average(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the model here: Accelerate would mistake views of a bucket for tied weights."""
        self._loaded_from = os.path.join(input_dir, _REPLICAS)
        if self._trained in models:
            models.remove(self._trained)
            self._trained.load_state_dict(load_file(os.path.join(input_dir, "model.safetensors")))

    def end_training(self) -> None:
        """Close gossip, unless ``gossip.finalize()`` has, and end training as Accelerate does."""
        if self._gossip is not None:
            self._gossip.close()
        super().end_training()
