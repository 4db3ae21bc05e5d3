"""torch.vmap through functorch's private API, with less overhead; the only module that uses it.

With a torch that lacks one of these names this module fails to import, and ``vmap.py`` falls back
to the public API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,  # pyright: ignore[reportPrivateUsage]
    _remove_batch_dim,  # pyright: ignore[reportPrivateUsage]
    _unwrap_batched,  # pyright: ignore[reportPrivateUsage]
    _vmap_decrement_nesting,  # pyright: ignore[reportPrivateUsage]
    _vmap_increment_nesting,  # pyright: ignore[reportPrivateUsage]
    maybe_current_level,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch.predispatch import lazy_load_decompositions

from gossamer.simulate.batches import each

_VMAP = TransformType.Vmap
_batch_size = CVmapInterpreterPtr.batchSize


@final
class FunctorchVmap:
    """``Vmap`` without pytree traversals of arguments.

    They take half a millisecond, as long as some matrix products of a small model.
    """

    def run(
        self, function: Callable[..., Any], dims: Sequence[int | None], num_workers: int, *args: Any
    ) -> Any:
        """Return what a function returns for each worker, stacked."""
        lazy_load_decompositions()
        level = _vmap_increment_nesting(num_workers, "error")

        def own(stacked: Tensor) -> Tensor:
            return _add_batch_dim(stacked, 0, level)

        def stacked(own: Tensor) -> Tensor:
            return _remove_batch_dim(own, level, num_workers, 0)

        try:
            pairs = zip(dims, args, strict=True)
            results = function(*(arg if dim is None else each(own, arg) for dim, arg in pairs))
            return each(stacked, results)
        finally:
            _vmap_decrement_nesting()

    def below(self, kernel: Callable[..., Any], *args: Any, drawn: bool = False) -> Any:
        """Run a kernel on all workers' tensors; return its result as each worker sees it."""
        vmap, level = peek_interpreter_stack(), maybe_current_level()
        if level != 1 or vmap.key() != _VMAP:
            raise NotImplementedError("there is a transform of torch.func inside of the model")
        pairs = [_unwrap_batched(a, level) if isinstance(a, Tensor) else (a, None) for a in args]
        dims = [dim for _, dim in pairs]
        own = drawn or any(dim is not None for dim in dims)
        num_workers = _batch_size(CVmapInterpreterPtr(vmap)) if own else 1
        layer = pop_dynamic_layer_stack()  # as torch's VmapInterpreter.lower(), without wrappers
        try:
            results = kernel(num_workers, dims, *(value for value, _ in pairs))
        finally:
            push_dynamic_layer_stack(layer)

        def wrap(result: Tensor) -> Tensor:
            return _add_batch_dim(result, 0, level) if own else result[0]

        return wrap(results) if isinstance(results, Tensor) else tuple(map(wrap, results))
