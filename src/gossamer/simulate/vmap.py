"""vmap over workers, with kernels inside of it that get the tensors of all workers.

``PublicVmap`` uses torch's public API: ``torch.vmap``, and a Function with a vmap rule.
``FunctorchVmap`` does the same faster, where torch still has the private names that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.autograd import Function


class Vmap(Protocol):
    """Runs a function of one worker on the tensors of many."""

    def run(
        self, function: Callable[..., Any], dims: Sequence[int | None], num_workers: int, *args: Any
    ) -> Any:
        """Return what a function returns for each worker, stacked.

        Args:
            function: from a worker's arguments to tensors, or a tuple or dict of them. Drawing
                random numbers in it is an error.
            dims: 0 for an argument of stacked tensors, None for one that all workers share.
            num_workers: how many.
            args: tensors, or tuples or dicts of them.
        """
        ...

    def below(self, kernel: Callable[..., Any], *args: Any, drawn: bool = False) -> Any:
        """Return what a kernel makes of all workers' tensors, as each worker sees it.

        For use inside of ``run``. What is the same for all workers is computed once, as for one.

        Args:
            kernel: from the number of workers, their dimension in each argument (None where there
                is none) and the arguments, to tensors with workers in front. Ordinary autograd
                records it.
            args: tensors and others.
            drawn: whether workers' results differ even where all arguments are the same.
        """
        ...


@final
class PublicVmap:
    """``Vmap`` by torch's public API, for any version."""

    def __init__(self) -> None:
        self._workers: Tensor | None = None
        """Each worker's index inside of ``run``: the one argument that is never shared."""

    def run(
        self, function: Callable[..., Any], dims: Sequence[int | None], num_workers: int, *args: Any
    ) -> Any:
        """Return what a function returns for each worker, stacked."""

        def of_worker(worker: Tensor, *own: Any) -> Any:
            self._workers = worker
            try:
                return function(*own)
            finally:
                self._workers = None

        indices = torch.arange(num_workers)
        return torch.vmap(of_worker, (0, *dims), randomness="error")(indices, *args)

    def below(self, kernel: Callable[..., Any], *args: Any, drawn: bool = False) -> Any:
        """Return what a kernel makes of all workers' tensors, as each worker sees it."""
        return _BelowVmap.apply(kernel, drawn, self._workers, *args)


class _BelowVmap(Function):
    """A kernel as a vmap rule; autograd records the kernel's operations, not this Function."""

    @staticmethod
    def forward(*args: Any) -> Any:
        """Raise: torch calls it only where the innermost transform is not the vmap over workers."""
        raise NotImplementedError("there is a transform of torch.func inside of the model")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing; torch takes no Function without it."""

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: Any, kernel: Any, drawn: bool, workers: Tensor, *args: Any
    ) -> tuple[Any, Any]:
        """Return the kernel's results, and the dimension of workers in them."""
        _, _, dim_of_workers, *structures = in_dims
        if dim_of_workers is None:
            return _BelowVmap.forward()
        # Arguments that are no tensors may be structures, and have a dimension for each leaf.
        dims = [dim if isinstance(dim, int) else None for dim in structures]
        own = drawn or any(dim is not None for dim in dims)
        results = kernel(info.batch_size if own else 1, dims, *args)
        if not own:
            one = results[0] if isinstance(results, Tensor) else tuple(r[0] for r in results)
            return one, None if isinstance(one, Tensor) else (None,) * len(one)
        return results, 0 if isinstance(results, Tensor) else (0,) * len(results)
