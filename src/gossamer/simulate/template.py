"""The model that all workers start from, and the computation of their gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gossamer.simulate.budget import memory_budget
from gossamer.simulate.chunks import ChunkedGradients
from gossamer.simulate.gradients import Loss, WorkerGradients
from gossamer.simulate.update import MakeOptimizer, state_bytes, trained_parameters


class Template(NamedTuple):
    """What every worker starts from, and gradients of W such workers."""

    model: nn.Module
    trained: dict[str, nn.Parameter]
    """The model's parameters that an optimizer is given, by name."""

    gradients: ChunkedGradients


def make_template(  # noqa: PLR0913 - one keyword per option
    model: nn.Module,
    loss: Loss,
    optimizer: MakeOptimizer,
    workers: int,
    dtype: torch.dtype,
    seed: int,
    memory_gb: float | None,
    gradients: str,
    *,
    one_model: bool = False,
) -> Template:
    """Return a checked copy of a model, after the check that there is memory for W workers.

    Args:
        model: not modified.
        loss: loss(output, target), a scalar.
        optimizer: from a list of parameters to a torch optimizer.
        workers: how many.
        dtype: of parameters.
        seed: of what forward passes draw.
        memory_gb: most memory of the simulation; None for what is free.
        gradients: the method, ``"auto"``, ``"vmap"`` or ``"loop"``.
        one_model: whether workers share one copy of everything but activations.
    """
    own = copy.deepcopy(model).to(dtype)
    trained = trained_parameters(own)
    held = bytes_of(own.buffers()) + state_bytes(optimizer, trained.values())
    budget = memory_budget(
        memory_gb, bytes_of(trained.values()), held, num_workers=workers, one_model=one_model
    )
    computed = ChunkedGradients(WorkerGradients(own, loss, seed), workers, gradients, budget)
    return Template(own, trained, computed)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all of these tensors."""
    return sum(tensor.nbytes for tensor in tensors)
