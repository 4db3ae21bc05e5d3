"""Layers for which torch.vmap has no rule, or a slow one, as kernels on stacked tensors.

``StackedKernels`` is active while a model runs under vmap. It sees every torch function that the
model calls and gives the few in its table a kernel of their own. A kernel gets tensors whose first
dimension is workers and runs below vmap, where ordinary autograd records it.
"""

# W: workers, T: time, B: batch, I: input features

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Dims = Sequence[int | None]


@final
class StackedKernels(TorchFunctionMode):
    """Kernels for some torch functions while workers run under vmap.

    Args:
        generators: returns one random generator per worker of the chunk; asked when first needed.
    """

    def __init__(self, generators: Callable[[], list[torch.Generator]]) -> None:
        super().__init__()
        self._new_generators = generators
        self._generators: list[torch.Generator] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the kernel of a function that has one, the function itself otherwise."""
        kernel = _KERNELS.get(func)
        arguments = kwargs or {}
        return kernel(self, *args, **arguments) if kernel else func(*args, **arguments)

    @property
    def generators(self) -> list[torch.Generator]:
        """One per worker; what is drawn from it continues from layer to layer."""
        if not self._generators:
            self._generators = self._new_generators()
        return self._generators


# Kernels have the names of torch's arguments, for calls that use them.


def _linear(_: StackedKernels, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _LinearUnderVmap.apply(input, weight, bias)


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
    if not dropout_p and query.dim() == 4:
        options["is_causal"] = is_causal
        return _AttentionUnderVmap.apply(query, key, value, attn_mask, options)
    if is_causal and attn_mask is not None:
        raise RuntimeError("attn_mask must not be set where is_causal is")
    scale = options.get("scale")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # As in torch: who may attend to nothing gets zeros, and no gradient.
    alone = (scores == -torch.inf).all(-1, keepdim=True)
    shares = scores.masked_fill(alone, 0.0).softmax(-1).masked_fill(alone, 0.0)
    return _dropout(mode, shares, dropout_p) @ value


def _dropout(
    mode: StackedKernels,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if not training or not 0 < p < 1:  # where torch draws nothing
        return F.dropout(input, p, training, inplace)
    y = cast("Tensor", _DropoutUnderVmap.apply(input, p, lambda: mode.generators))
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
    # torch's rule looks up in one table of all workers, where only worker 0's padding is known.
    padding = padding_idx if padding_idx >= 0 else weight.shape[0] + padding_idx
    return torch.where((input == padding).unsqueeze(-1), y.detach(), y)


def _lstm(mode: StackedKernels, *args: Any) -> Any:
    if isinstance(args[1], Tensor):  # a packed sequence, whose arguments are others
        return torch.lstm(*args)
    x, hx, weights, has_biases, num_layers, p, training, bidirectional, batch_first = args
    ways = 2 if bidirectional else 1
    size = len(weights) // (num_layers * ways)
    if size != (4 if has_biases else 2):  # a projection of h
        return torch.lstm(*args)
    cells = [tuple(weights[i : i + size]) for i in range(0, len(weights), size)]
    hidden, cell = (list(state.unbind(0)) for state in hx)
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(num_layers):
        outputs: list[Tensor] = []
        for i in range(layer * ways, (layer + 1) * ways):
            backwards = i % ways == 1
            inputs = x.flip(0) if backwards else x
            y, hidden[i], cell[i] = cast(
                "Any", _LstmUnderVmap.apply(inputs, hidden[i], cell[i], *cells[i])
            )
            outputs.append(y.flip(0) if backwards else y)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if layer < num_layers - 1:
            x = _dropout(mode, x, p, training)
    x = x.transpose(0, 1) if batch_first else x
    return x, torch.stack(hidden), torch.stack(cell)


def _without_override_check(function: Any) -> Any:
    """Return a function of torch.nn.functional that does not stop at the mode.

    A mode is off while it handles a function, and would not see what the function calls; and the
    function hands itself to any mode that is on.
    """
    names = {**function.__globals__, "has_torch_function": lambda _: False}  # pyright: ignore[reportUnknownLambdaType]
    twin = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


_multi_head_attention_forward = _without_override_check(F.multi_head_attention_forward)


def _multi_head_attention(mode: StackedKernels, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return _multi_head_attention_forward(*args, **kwargs)


_KERNELS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _multi_head_attention,
    torch.lstm: _lstm,
}


class _UnderVmap(Function):
    """What the kernels share: only the rule for vmap is ever used."""

    @staticmethod
    def forward(*args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError("every worker has the same tensor here; run workers in a loop")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class _LinearUnderVmap(_UnderVmap):
    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_dim, weight_dim, bias_dim = in_dims
        if weight_dim is None:  # one model for all workers: one product over all of them
            y = F.linear(x.movedim(cast("int", x_dim), 0), weight)
            if bias is None:
                return y, 0
            many = bias if bias_dim is None else bias.movedim(bias_dim, 0)
            return y + many.reshape(-1, *[1] * (y.dim() - 2), y.shape[-1]), 0
        x, weight, bias = (
            _in_front(tensor, dim, info.batch_size)
            for tensor, dim in zip((x, weight, bias), in_dims, strict=True)
        )
        return StackedLinear.apply(x, weight, bias), 0


class _AttentionUnderVmap(_UnderVmap):
    @staticmethod
    def vmap(info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, kw: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        num_workers = info.batch_size
        # Attention has no parameters: workers are more of the batch.
        q, k, v, mask = (
            _in_front(tensor, dim, num_workers)
            for tensor, dim in zip((q, k, v, mask), in_dims[:4], strict=True)
        )
        if mask is not None:
            mask = mask.reshape(num_workers, *[1] * (q.dim() - mask.dim()), *mask.shape[1:])
            mask = mask.expand(num_workers, q.shape[1], *mask.shape[2:]).flatten(0, 1)
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, **kw)
        return y.unflatten(0, (num_workers, -1)), 0


class _DropoutUnderVmap(_UnderVmap):
    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, p: float, generators: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = x.movedim(cast("int", in_dims[0]), 0)
        # Strides of their own kind: torch fills memory in its order, not in that of indices.
        masks = [
            torch.empty_like(row).bernoulli_(1 - p, generator=generator)
            for row, generator in zip(x, generators(), strict=True)
        ]
        return x * torch.stack(masks).div_(1 - p), 0


class _LstmUnderVmap(_UnderVmap):
    @staticmethod
    def vmap(info: Any, in_dims: Dims, *tensors: Tensor) -> Any:
        x, h, c, w_input, w_hidden, *biases = (
            _in_front(tensor, dim, info.batch_size)
            for tensor, dim in zip(tensors, in_dims, strict=True)
        )
        return stacked_lstm(x, h, c, w_input, w_hidden, sum(biases) if biases else None), (0, 0, 0)


def stacked_lstm(
    x_WTBI: Tensor, h: Tensor, c: Tensor, w_input: Tensor, w_hidden: Tensor, bias: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer and direction of an LSTM for all workers; returns all h, the last h, the last c.

    The part of the gates that depends on the input is one product over all time steps.
    """
    from_input = StackedLinear.apply(x_WTBI, w_input, bias)
    transposed = w_hidden.mT
    outputs: list[Tensor] = []
    for now in cast("Tensor", from_input).unbind(1):
        i, f, g, o = torch.baddbmm(now, h, transposed).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs, 1), h, c


class StackedLinear(Function):
    """x_W @ weight_W.T + bias_W for all workers in one batched product.

    vmap's own rule returns the gradient of the weight transposed, which costs a copy of it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return y with the leading dimensions of x."""
        ctx.save_for_backward(x, weight)
        rows = x.reshape(x.shape[0], -1, x.shape[-1])
        if bias is None:
            y = torch.bmm(rows, weight.mT)
        else:
            y = torch.bmm(rows, weight.mT).add_(bias.unsqueeze(1))
        # Not a view: autograd would refuse to have it changed in place, as by ReLU(inplace=True).
        return torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], weight.shape[1]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of those inputs that need one."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = x.reshape(x.shape[0], -1, x.shape[-1])
        grads = grad.reshape(*rows.shape[:2], grad.shape[-1])
        return (
            torch.bmm(grads, weight).view_as(x) if needs_x else None,
            torch.bmm(grads.mT, rows) if needs_weight else None,
            grads.sum(1) if needs_bias else None,
        )


def _in_front(tensor: Any, dim: int | None, num_workers: int) -> Any:
    """Return a tensor with workers as its first dimension; the same for all where it had none."""
    if tensor is None:
        return None
    if dim is None:
        return tensor.expand(num_workers, *tensor.shape)
    return tensor.movedim(dim, 0)
