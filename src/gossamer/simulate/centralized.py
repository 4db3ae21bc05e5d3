"""Centralized data-parallel training of W workers: averaged gradients, one model.

What DistributedDataParallel computes on W ranks, with one copy of everything but activations.
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
from gossamer.optim import with_num_workers
from gossamer.simulate.clipping import check_clip_norm
from gossamer.simulate.gradients import ChunkGradients, Loss
from gossamer.simulate.template import bytes_of, make_template
from gossamer.simulate.update import MakeOptimizer, build
from gossamer.simulate.workers import AllWorkers
from gossamer.topology.cost import ring_copies


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
        clip_norm: the largest norm of the mean gradient; 0 clips nothing.
    """

    def __init__(  # noqa: PLR0913 - one keyword per option
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
        clip_norm: float = 0.0,
    ) -> None:
        check_clip_norm(clip_norm)
        if workers < 1:
            raise UserError(f"workers must be at least 1, got {workers}; 1 is plain training")
        self.num_steps = 0
        self.num_workers = workers
        self._clip_norm = clip_norm
        optimizer = with_num_workers(optimizer, 1)  # all workers share one model and its optimizer
        template = make_template(
            model, loss, optimizer, workers, dtype, seed, memory_gb, gradients, one_model=True
        )
        self._model, self._trained, self._gradients = template
        self._buffers = dict(self._model.named_buffers())
        self.optimizer: Optimizer = build(optimizer, list(self._trained.values()))
        """The optimizer, for learning-rate schedulers."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The model's parameters by name: the tensors themselves, no copies."""
        return {name: p.detach() for name, p in self._trained.items()}

    @property
    def bytes_sent(self) -> npt.NDArray[np.float64]:
        """Bytes that each worker would have sent so far in ring all-reduces of gradients, [W]."""
        copies = ring_copies(self.num_workers) * self.num_steps
        return np.full(self.num_workers, copies * bytes_of(self._trained.values()))

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Train for one step; arguments and result as in ``Simulation.step``."""
        losses = self._gradient(inputs, targets)
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self._trained.values(), self._clip_norm)
        self.optimizer.step()
        self.num_steps += 1
        return losses

    def _gradient(self, inputs: Any, targets: Any) -> Tensor:
        """Compute each worker's loss and the mean gradient; return the losses, [W]."""
        # Every worker starts from the buffers as they are now; only worker 0's changes are kept.
        start = {name: buffer.clone() for name, buffer in self._buffers.items()}
        workers = AllWorkers(
            self.num_workers, self._trained, start, inputs, targets, one_model=True
        )
        losses_W = workers.new_losses()
        self.optimizer.zero_grad()
        for computed in self._gradients.compute(self.num_steps, workers):
            losses_W[computed.chunk.index] = computed.losses
            self._add(computed.gradients)
            if computed.chunk.workers.start == 0:
                self._keep_buffers(computed)
            del computed  # its gradients must not live on while the next chunk is computed
        return losses_W

    def _add(self, gradients: Mapping[str, Tensor | None]) -> None:
        for name, grad in gradients.items():
            if grad is None:
                continue
            p = self._trained[name]
            # Cloned: autograd's gradients may alias each other, or be expanded views.
            p.grad = grad.clone() if p.grad is None else p.grad.add_(grad)

    def _keep_buffers(self, computed: ChunkGradients) -> None:
        """Keep the buffers of the first worker of a chunk."""
        after = {**computed.chunk.buffers, **computed.replaced}
        several = isinstance(computed.chunk.index, slice)
        for name, buffer in self._buffers.items():
            buffer.copy_(after[name][0] if several else after[name])

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
        """Return the state, as ``Simulation.state_dict`` does."""
        return {
            "num_steps": self.num_steps,
            "model": self._model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gradients": self._gradients.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of one that was built with the same arguments."""
        self._model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._gradients.load_state_dict(state["gradients"])
        self.num_steps = state["num_steps"]
