"""Losses and gradients of a chunk of workers under vmap, or of a single worker.

From a ``Chunk`` to ``ChunkGradients``; the caller decides where to store them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import UserError
from gossamer.seeds import worker_seed
from gossamer.simulate.kernels import StackedKernels
from gossamer.simulate.vmap import PublicVmap, Vmap
from gossamer.simulate.workers import Chunk, NamedTensors

try:
    from gossamer.simulate.functorch import FunctorchVmap
except (ImportError, AttributeError) as _error:  # a torch without its private names
    logging.getLogger(__name__).info("simulations use torch.vmap, which is slower: %s", _error)
    FunctorchVmap = None

Loss: TypeAlias = Callable[[Any, Any], Tensor]


class ChunkGradients(NamedTuple):
    """Losses, gradients and buffers of a chunk."""

    chunk: Chunk
    """The inputs; gradients with memory in its ``into`` may have been written there."""

    losses: Tensor
    """Of each worker, or of the one."""

    gradients: dict[str, Tensor | None]
    """By parameter name; may alias the tensor in ``into``. None where the parameter is unused."""

    replaced: dict[str, Tensor]
    """By name, the buffers that the forward pass replaced instead of changing in place."""


@final
class WorkerGradients:
    """Computes losses and gradients of a model, with parameters and buffers that are passed in.

    Args:
        model: one worker's.
        loss: loss(output, target), a scalar.
        seed: of what forward passes draw.
    """

    def __init__(self, model: nn.Module, loss: Loss, seed: int) -> None:
        # A copy, because functional_call swaps parameters into it, and tensors of a finished vmap
        # may remain: a cached activation, or a parameter of a shared module. For the same reason
        # the names of tied tensors are found here, before any vmap.
        self._model = copy.deepcopy(model)
        self._names = _names(model)
        self._loss = loss
        self._seed = seed
        self._vmap: Vmap = PublicVmap() if FunctorchVmap is None else FunctorchVmap()

    def single(self, step: int, chunk: Chunk) -> ChunkGradients:
        """Compute one worker; torch's default generator is restored afterwards."""
        (worker,) = chunk.workers
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(worker_seed(self._seed, worker, step))
        try:
            return _backward(chunk, *self._forward(*chunk.arguments))
        finally:
            generator.set_state(before)

    def vmapped(self, step: int, chunk: Chunk) -> ChunkGradients:
        """Compute all workers of a chunk under vmap."""

        def generators() -> list[torch.Generator]:
            seeds = (worker_seed(self._seed, worker, step) for worker in chunk.workers)
            return [torch.Generator().manual_seed(seed) for seed in seeds]

        into = [(chunk.parameters[name], grad) for name, grad in chunk.into.items()]
        dims = (None if chunk.one_model else 0, 0, 0, 0)
        with StackedKernels(self._vmap, generators, into):
            losses, replaced = self._vmap.run(
                self._forward, dims, len(chunk.workers), *chunk.arguments
            )
        return _backward(chunk, losses, replaced)

    def layer_of(self, error: BaseException) -> str:
        """Name the innermost layer that an exception came through."""
        names = {id(module): name for name, module in self._model.named_modules()}
        found = "the loss"
        trace = error.__traceback__
        while trace is not None:
            module = trace.tb_frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in names:
                found = f"layer {names[id(module)] or 'model'!r} ({type(module).__name__})"
            trace = trace.tb_next
        return found

    def _forward(
        self, parameters: NamedTensors, buffers: NamedTensors, inputs: Any, targets: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a worker's loss, and the buffers that its forward pass replaced."""
        args, kwargs = (), {}
        if isinstance(inputs, dict):
            kwargs = inputs
        else:
            args = inputs if isinstance(inputs, tuple) else (inputs,)
        given = {**parameters, **buffers}
        tensors = {name: given[first] for name, first in self._names.items() if first in given}
        output = functional_call(self._model, tensors, args, kwargs, tie_weights=False)
        replaced = {n: tensors[n].detach() for n, b in buffers.items() if tensors[n] is not b}
        for name, new in replaced.items():
            if new.shape != buffers[name].shape:
                raise UserError(
                    f"a forward pass must keep the shapes of buffers, got {tuple(new.shape)} for "
                    f"{name!r} of {tuple(buffers[name].shape)}; register it in its final shape"
                )
        loss = self._loss(output, targets)
        if loss.dim():
            raise UserError(
                f"loss(output, target) must return a scalar, the mean over a worker's batch, got "
                f"shape {tuple(loss.shape)}; call .mean() on it"
            )
        return loss, replaced


def _backward(chunk: Chunk, losses: Tensor, replaced: dict[str, Tensor]) -> ChunkGradients:
    grads: Any = torch.autograd.grad(
        losses,
        tuple(chunk.parameters.values()),
        torch.full_like(losses, chunk.weight),
        allow_unused=True,
    )
    named = dict(zip(chunk.parameters, grads, strict=True))
    return ChunkGradients(chunk, losses.detach(), named, replaced)


def _names(model: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to the first name of the same (tied) tensor."""
    first: dict[int, str] = {}
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}
