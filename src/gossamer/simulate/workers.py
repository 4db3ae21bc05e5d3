"""The inputs of all workers' gradients in a step, and chunks of them."""

# W: workers

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from torch import Tensor
from torch.utils._pytree import tree_leaves

from gossamer.simulate.batches import check_workers, select

NamedTensors: TypeAlias = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class Chunk:
    """The inputs of some workers, with a leading dimension; or of one worker, without."""

    index: int | slice
    """Which worker, or which workers."""

    parameters: NamedTensors
    """By name; of all workers in common where they have one model."""

    buffers: dict[str, Tensor]
    """By name; a forward pass may change them in place."""

    inputs: Any
    """Of the model."""

    targets: Any
    """Of the loss."""

    into: NamedTensors
    """By name, memory that gradients of parameters may be written to."""

    one_model: bool
    """Whether parameters have no leading dimension, because all workers have the same."""

    weight: float
    """Factor of each worker's loss in the sum that is differentiated."""

    @property
    def workers(self) -> range:
        """Which workers, as a range."""
        if isinstance(self.index, slice):
            return range(self.index.start, self.index.stop)
        return range(self.index, self.index + 1)

    @property
    def arguments(self) -> tuple[NamedTensors, dict[str, Tensor], Any, Any]:
        """The arguments of a forward pass."""
        return self.parameters, self.buffers, self.inputs, self.targets

    @property
    def tensors(self) -> list[Tensor]:
        """All that is computed at or written to."""
        named = (*self.parameters.values(), *self.buffers.values(), *self.into.values())
        return [*named, *tree_leaves((self.inputs, self.targets))]


@final
@dataclass(frozen=True)
class AllWorkers:
    """The inputs of all workers in a step: every tensor has workers as its first dimension.

    Except with one shared model, whose parameters and buffers have no such dimension: gradients are
    then of the mean loss, and every worker starts from a copy of the buffers.
    """

    num_workers: int
    parameters: NamedTensors
    buffers: NamedTensors
    inputs: Any
    targets: Any
    into: NamedTensors = field(default_factory=dict[str, Tensor])
    one_model: bool = False

    def __post_init__(self) -> None:
        check_workers(self.inputs, "inputs", self.num_workers)
        check_workers(self.targets, "targets", self.num_workers)

    def new_losses(self) -> Tensor:
        """Return memory for the loss of each worker, [W]."""
        return self._first.new_empty(self.num_workers)

    def chunk(self, index: int | slice) -> Chunk:
        """Return one worker, or some."""
        parameters, buffers = self.parameters, self.buffers
        if self.one_model:
            rows = (index.stop - index.start,) if isinstance(index, slice) else ()
            own = {n: b.expand((*rows, *b.shape)).clone() for n, b in buffers.items()}
        else:
            parameters = {n: p.detach()[index].requires_grad_() for n, p in parameters.items()}
            own = {n: b[index] for n, b in buffers.items()}
        dtype = self._first.dtype
        return Chunk(
            index,
            parameters,
            own,
            select(self.inputs, index, dtype),
            select(self.targets, index, dtype),
            {n: grad[index] for n, grad in self.into.items()},
            self.one_model,
            1 / self.num_workers if self.one_model else 1.0,
        )

    @property
    def _first(self) -> Tensor:
        return next(iter(self.parameters.values()))
