"""Centralized data-parallel training of W workers: averaged gradients, one model.

What DistributedDataParallel computes on W ranks, without W copies of anything but activations.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.errors import UserError
from gossamer.simulate.batches import check_workers, select
from gossamer.simulate.gradients import Evaluate, Loss, Part, PerWorker
from gossamer.simulate.memory import room
from gossamer.simulate.update import MakeOptimizer, build, state_bytes, trained_parameters


@final
class Centralized:
    """W workers that all-reduce gradients; equal to one batch of all workers' samples.

    Normalization layers use each worker's own batch in training, and running statistics are worker
    0's, both as in DistributedDataParallel. Without such layers the step is that of one model on
    one batch.

    Args:
        model: a template, not modified.
        loss: loss(output, target), a scalar: the mean over one worker's batch.
        optimizer: from a list of parameters to any torch optimizer that takes one gradient per
            step.
        workers: how many.
        dtype: of parameters, and of floating-point inputs.
        seed: of what forward passes draw, as in ``Simulation``.
        memory_gb: most memory for the model and activations; by default what is free.
        gradients: as in ``Simulation``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: MakeOptimizer,
        workers: int,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        memory_gb: float | None = None,
        gradients: str = "auto",
    ) -> None:
        if workers < 1:
            raise UserError(f"workers must be at least 1, got {workers}; 1 is plain training")
        self.num_steps = 0
        self.num_workers = workers
        self._model = copy.deepcopy(model).to(dtype)
        self._trained = trained_parameters(self._model)
        self._buffers = dict(self._model.named_buffers())
        self.optimizer: Optimizer = build(optimizer, list(self._trained.values()))
        """The optimizer, for learning-rate schedulers."""
        model_bytes = sum(p.nbytes for p in self._trained.values())
        state = sum(b.nbytes for b in self._buffers.values())
        state += state_bytes(optimizer, self._trained.values())
        self._per_worker = PerWorker(
            self._model,
            loss,
            num_workers=workers,
            seed=seed,
            method=gradients,
            one_model=True,
            room=room(memory_gb, model_bytes, state, num_workers=workers, one_model=True),
        )

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The model's parameters by name: the tensors themselves, no copies."""
        return {name: p.detach() for name, p in self._trained.items()}

    @property
    def bytes_sent(self) -> npt.NDArray[np.float64]:
        """Bytes that each worker would have sent so far in ring all-reduces of gradients, [W]."""
        copies = 2 * (self.num_workers - 1) / self.num_workers * self.num_steps
        num_bytes = sum(p.nbytes for p in self._trained.values())
        return np.full(self.num_workers, copies * num_bytes)

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Train for one step; arguments and result as in ``Simulation.step``."""
        losses = self._gradient(inputs, targets)
        self.optimizer.step()
        self.num_steps += 1
        return losses

    def _gradient(self, inputs: Any, targets: Any) -> Tensor:
        """Compute each worker's loss and the mean gradient; return the losses, [W]."""
        check_workers(inputs, "inputs", self.num_workers)
        check_workers(targets, "targets", self.num_workers)
        self.optimizer.zero_grad()
        first = next(iter(self._trained.values()))
        losses_W = torch.empty(self.num_workers, dtype=first.dtype, device=first.device)
        start = {name: buffer.clone() for name, buffer in self._buffers.items()}

        def backward(index: int | slice, evaluate: Evaluate) -> None:
            x, y = select(inputs, index, first.dtype), select(targets, index, first.dtype)
            rows = losses_W[index].shape
            buffers = {
                name: buffer.expand((*rows, *buffer.shape)).clone()
                for name, buffer in start.items()
            }
            losses = evaluate(Part(self._trained, buffers, x, y, {}))
            losses_W[index] = losses.detach()
            mean = losses.sum() / self.num_workers
            grads: Any = torch.autograd.grad(mean, tuple(self._trained.values()), allow_unused=True)
            for p, grad in zip(self._trained.values(), grads, strict=True):
                if grad is None:
                    continue
                # Gradients may share memory with each other, or be one number for many.
                p.grad = grad.clone() if p.grad is None else p.grad.add_(grad)
            if index == 0 or (isinstance(index, slice) and index.start == 0):
                for name, buffer in self._buffers.items():
                    buffer.copy_(buffers[name][0] if rows else buffers[name])

        self._per_worker.run(self.num_steps, {}, backward)
        return losses_W

    def consensus_distance(self) -> float:
        """Return 0: all workers hold one model."""
        return 0.0

    def average(self) -> nn.Module:
        """Return a copy of the model."""
        return copy.deepcopy(self._model)

    def worker(self, worker: int) -> nn.Module:
        """Return a copy of the model, which is every worker's."""
        return self.average()

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to continue, as ``Simulation.state_dict`` does."""
        return {
            "num_steps": self.num_steps,
            "model": self._model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gradients": self._per_worker.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of one that was built with the same arguments."""
        self._model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._per_worker.load_state_dict(state["gradients"])
        self.num_steps = state["num_steps"]
