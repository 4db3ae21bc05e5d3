"""Layers for which torch.vmap has no rule, or a slow one, as kernels on stacked tensors.

``StackedKernels`` is a mode that is active while a model runs under vmap. It intercepts every torch
function that the model calls and replaces the few in its table by kernels. A kernel gets tensors
whose first dimension is workers (``stacked.py``, ``lstm.py``) and runs below vmap, where ordinary
autograd records it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gossamer.simulate.lstm import lstm_of_all
from gossamer.simulate.stacked import (
    attention_of_all,
    batch_norm_of_all,
    cross_entropy_of_all,
    dropout_of_all,
    linear_of_all,
    self_attention_of_all,
)
from gossamer.simulate.vmap import Vmap


@final
class StackedKernels(TorchFunctionMode):
    """Kernels for some torch functions while workers run under vmap.

    Args:
        vmap: what workers run under.
        generators: returns one random generator per worker of the chunk; called on first use.
        into: for parameters of the chunk, where a kernel may write their gradient.
    """

    def __init__(
        self,
        vmap: Vmap,
        generators: Callable[[], list[torch.Generator]],
        into: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        super().__init__()
        self.below_vmap = vmap.below
        """Gives a kernel the tensors of all workers."""
        self._new_generators = generators
        self._generators: list[torch.Generator] = []
        self._into = {parameter.data_ptr(): grad for parameter, grad in into}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the kernel of a function that has one, the function itself otherwise."""
        kernel = _KERNELS.get(func)
        arguments = kwargs or {}
        return kernel(self, *args, **arguments) if kernel else func(*args, **arguments)

    @property
    def generators(self) -> list[torch.Generator]:
        """One per worker, shared by all layers: a layer draws where the one before it stopped."""
        # Created once: new ones would repeat the random numbers of the first layer.
        if not self._generators:
            self._generators = self._new_generators()
        return self._generators

    def into(self, weight: Tensor) -> Tensor | None:
        """Return the memory for a parameter's gradient, once; None for a view or a second use."""
        # A tied weight is used twice: a second kernel that wrote here would overwrite the first. A
        # view of a parameter (its first rows, say) has its address, but not its gradient's shape.
        grad = self._into.get(weight.data_ptr())
        if grad is None or grad.shape != weight.shape or not weight.is_contiguous():
            return None
        return self._into.pop(weight.data_ptr())


# Arguments have torch's names, because calls may pass them by keyword.


def _linear(mode: StackedKernels, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return mode.below_vmap(linear_of_all, input, weight, bias, mode.into)


def _attention(
    mode: StackedKernels,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    # With dropout torch's kernel would draw from the global generator, not from each worker's own.
    if not dropout_p and query.dim() == 4:
        options["is_causal"] = is_causal
        return mode.below_vmap(attention_of_all, query, key, value, attn_mask, options)
    if is_causal and attn_mask is not None:
        raise RuntimeError("attn_mask must not be set together with is_causal")
    scale = options.get("scale")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # As in torch, a query whose mask is all false gets zeros, and no gradient. A softmax over -inf
    # alone would be NaN, and with it the gradients of keys and values.
    masked = (scores == -torch.inf).all(-1, keepdim=True)
    shares = scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)
    return _dropout(mode, shares, dropout_p) @ value


def _batch_norm(  # noqa: PLR0913 - torch's arguments
    mode: StackedKernels,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    tensors = (input, running_mean, running_var, weight, bias)
    options = {"training": training, "momentum": momentum, "eps": eps}
    return mode.below_vmap(batch_norm_of_all, *tensors, options)


def _dropout(
    mode: StackedKernels,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if not training or not 0 < p < 1:  # torch draws nothing then, so generators must not advance
        return F.dropout(input, p, training, inplace)
    # drawn: masks differ between workers even if the input is the same for all of them.
    y = mode.below_vmap(dropout_of_all, input, p, lambda: mode.generators, drawn=True)
    return input.copy_(y) if inplace else y


def _embedding(
    _: StackedKernels,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotImplementedError("an embedding has max_norm, scale_grad_by_freq or sparse")
    y = F.embedding(input, weight)
    if padding_idx is None:
        return y
    # torch's rule concatenates all workers' tables, in which padding_idx is a row of worker 0 only:
    # the padding rows of the others would be trained.
    padding = padding_idx if padding_idx >= 0 else weight.shape[0] + padding_idx
    return torch.where((input == padding).unsqueeze(-1), y.detach(), y)


def _lstm(mode: StackedKernels, *args: Any) -> Any:
    if isinstance(args[1], Tensor):  # a packed sequence, which has another signature
        return torch.lstm(*args)
    x, hx, weights, has_biases, num_layers, p, training, bidirectional, batch_first = args
    ways = 2 if bidirectional else 1
    size = len(weights) // (num_layers * ways)
    if size != (4 if has_biases else 2):  # one more weight per cell: a projection of h
        return torch.lstm(*args)
    cells = [tuple(weights[i : i + size]) for i in range(0, len(weights), size)]
    hidden, cell = (list(state.unbind(0)) for state in hx)
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(num_layers):
        outputs: list[Tensor] = []
        for i in range(layer * ways, (layer + 1) * ways):
            backwards = i % ways == 1
            inputs = x.flip(0) if backwards else x
            y, hidden[i], cell[i] = mode.below_vmap(
                lstm_of_all, mode.into, inputs, hidden[i], cell[i], *cells[i]
            )
            outputs.append(y.flip(0) if backwards else y)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        # As in torch, not after the last layer: another draw would shift all later masks.
        if layer < num_layers - 1:
            x = _dropout(mode, x, p, training)
    x = x.transpose(0, 1) if batch_first else x
    return x, torch.stack(hidden), torch.stack(cell)


def _cross_entropy(  # noqa: PLR0913 - torch's arguments
    mode: StackedKernels,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    mean = weight is None and size_average is None and reduce is None and reduction == "mean"
    classes = 0 < target.dim() < input.dim()
    if mean and classes:  # torch's vmap rule for these is written in Python, and slow
        return mode.below_vmap(cross_entropy_of_all, input, target, ignore_index, label_smoothing)
    return F.cross_entropy(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def _without_override_check(function: Any) -> Any:
    """Return a function of torch.nn.functional without its ``has_torch_function`` dispatch.

    A mode is disabled while it handles a function, so it does not intercept the calls inside of it;
    with the mode enabled again, the function would dispatch to the mode itself, endlessly.
    """
    names = {**function.__globals__, "has_torch_function": lambda _: False}  # pyright: ignore[reportUnknownLambdaType]
    twin = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


_multi_head_attention_forward = _without_override_check(F.multi_head_attention_forward)


_ATTENTION_ARGUMENTS = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
_EXTENSIONS = ("bias_k", "bias_v", "key_padding_mask", "static_k", "static_v", "q_proj_weight")


def _multi_head_attention(mode: StackedKernels, *args: Any, **kwargs: Any) -> Any:
    given = {**dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)), **kwargs}
    if not _attends_to_itself(given):
        with mode:
            return _multi_head_attention_forward(*args, **kwargs)
    x = given["query"].transpose(0, 1)
    x = _linear(mode, x, given["in_proj_weight"], given["in_proj_bias"])
    y = mode.below_vmap(self_attention_of_all, x, given["num_heads"], given.get("is_causal", False))
    y = _linear(mode, y, given["out_proj_weight"], given["out_proj_bias"])
    return y.transpose(0, 1), None


def _attends_to_itself(given: dict[str, Any]) -> bool:
    """Return whether this is plain self-attention, full or causal."""
    query, is_causal = given["query"], given.get("is_causal", False)
    return (
        query is given["key"]
        and query is given["value"]
        and query.dim() == 3
        # With is_causal torch ignores the mask, and requires one. A mask without it may be any.
        and (given.get("attn_mask") is not None) == is_causal
        and all(given.get(name) is None for name in _EXTENSIONS)
        and not given["add_zero_attn"]
        and not given.get("need_weights", True)
        and not (given.get("training", True) and given["dropout_p"])
    )


_KERNELS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    F.cross_entropy: _cross_entropy,
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _multi_head_attention,
    torch.lstm: _lstm,
}
