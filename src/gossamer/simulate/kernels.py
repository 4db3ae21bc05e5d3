"""Layers for which torch.vmap has no rule, or a slow one, as kernels on stacked tensors.

``StackedKernels`` is active while a model runs under vmap. It sees every torch function that the
model calls and gives the few in its table a kernel of their own. A kernel gets tensors whose first
dimension is workers and runs below vmap, where ordinary autograd records it.
"""

# W: workers, T: time, B: batch, I: input features

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
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
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Dims = Sequence[int | None]


Convert = Callable[[Tensor], Tensor]


@contextmanager
def vmapped(num_workers: int) -> Generator[tuple[Convert, Convert], None, None]:
    """Run what is inside as torch.vmap would, without its walk through all arguments.

    That walk takes half a millisecond, as long as some of a small model's products.

    Yields:
        Two functions: from a stacked tensor to what a worker sees of it, and back.
    """
    lazy_load_decompositions()
    level = _vmap_increment_nesting(num_workers, "error")
    try:
        yield (
            lambda stacked: _add_batch_dim(stacked, 0, level),
            lambda own: _remove_batch_dim(own, level, num_workers, 0),
        )
    finally:
        _vmap_decrement_nesting()


@final
class StackedKernels(TorchFunctionMode):
    """Kernels for some torch functions while workers run under vmap.

    Args:
        generators: returns one random generator per worker of the chunk; asked when first needed.
        into: for parameters of the chunk, where a kernel may write their gradient.
    """

    def __init__(
        self,
        generators: Callable[[], list[torch.Generator]],
        into: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        super().__init__()
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
        """One per worker; what is drawn from it continues from layer to layer."""
        if not self._generators:
            self._generators = self._new_generators()
        return self._generators

    def into(self, weight: Tensor) -> Tensor | None:
        """Return where to write a gradient: once, for a weight that is a whole parameter."""
        grad = self._into.get(weight.data_ptr())
        if grad is None or grad.shape != weight.shape or not weight.is_contiguous():
            return None
        return self._into.pop(weight.data_ptr())


# Kernels have the names of torch's arguments, for calls that use them.


def _linear(mode: StackedKernels, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _below_vmap(_linear_of_all, input, weight, bias, mode.into)


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
        return _below_vmap(_attention_of_all, query, key, value, attn_mask, options)
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
    y = _below_vmap(_dropout_of_all, input, p, lambda: mode.generators, drawn=True)
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
            y, hidden[i], cell[i] = _below_vmap(
                _lstm_of_all, mode.into, inputs, hidden[i], cell[i], *cells[i]
            )
            outputs.append(y.flip(0) if backwards else y)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if layer < num_layers - 1:
            x = _dropout(mode, x, p, training)
    x = x.transpose(0, 1) if batch_first else x
    return x, torch.stack(hidden), torch.stack(cell)


def _cross_entropy(
    _: StackedKernels,
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
    if mean and classes:  # torch's rule for these is written in Python
        return _below_vmap(_cross_entropy_of_all, input, target, ignore_index, label_smoothing)
    return F.cross_entropy(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


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
    F.cross_entropy: _cross_entropy,
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _multi_head_attention,
    torch.lstm: _lstm,
}


def _below_vmap(kernel: Callable[..., Any], *args: Any, drawn: bool = False) -> Any:
    """Call a kernel on the tensors that vmap has wrapped, and wrap its results.

    As torch calls a Function that has a rule for vmap; but its bookkeeping takes longer than the
    products of a small model. What is the same for all workers is computed once, as for one.

    Args:
        kernel: from the number of workers, their dimension in each argument (None where there is
            none) and the arguments, to tensors with workers in front.
        args: tensors and others.
        drawn: whether workers' results differ even where all arguments are the same.
    """
    vmap, level = peek_interpreter_stack(), maybe_current_level()
    if level != 1 or vmap.key() != TransformType.Vmap:
        raise NotImplementedError("there is a transform of torch.func inside of the model")
    pairs = [_unwrap_batched(a, level) if isinstance(a, Tensor) else (a, None) for a in args]
    dims = [dim for _, dim in pairs]
    own = drawn or any(dim is not None for dim in dims)
    num_workers = CVmapInterpreterPtr(vmap).batchSize() if own else 1
    layer = pop_dynamic_layer_stack()  # as torch's VmapInterpreter.lower(), without its wrappers
    try:
        results = kernel(num_workers, dims, *(value for value, _ in pairs))
    finally:
        push_dynamic_layer_stack(layer)

    def wrap(result: Tensor) -> Tensor:
        return _add_batch_dim(result, 0, level) if own else result[0]

    return wrap(results) if isinstance(results, Tensor) else tuple(map(wrap, results))


def _linear_of_all(
    num_workers: int, dims: Dims, x: Tensor, weight: Tensor, bias: Any, into: Any
) -> Any:
    x_dim, weight_dim, bias_dim, _ = dims
    if weight_dim is None:  # one model for all workers: one product over all of them
        y = F.linear(_in_front(num_workers, x_dim, x), weight)
        if bias is None:
            return y
        many = bias if bias_dim is None else bias.movedim(bias_dim, 0)
        return y + many.reshape(-1, *[1] * (y.dim() - 2), y.shape[-1])
    x, weight, bias = _all_in_front(num_workers, dims, x, weight, bias)
    return StackedLinear.apply(x, weight, bias, into(weight))


def _attention_of_all(
    num_workers: int, dims: Dims, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Any
) -> Any:
    # Attention has no parameters: workers are more of the batch.
    q, k, v = _all_in_front(num_workers, dims[:3], q, k, v)
    if mask is not None and dims[3] is None and mask.shape[:-2].numel() == 1:
        mask = mask.view(mask.shape[-2:])  # one for all samples, too: torch needs no copies of it
    elif mask is not None:
        mask = _in_front(num_workers, dims[3], mask)
        mask = mask.reshape(num_workers, *[1] * (q.dim() - mask.dim()), *mask.shape[1:])
        mask = mask.expand(num_workers, q.shape[1], *mask.shape[2:]).flatten(0, 1)
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, mask, **options)
    return y.unflatten(0, (num_workers, -1))


def _dropout_of_all(num_workers: int, dims: Dims, x: Tensor, p: float, generators: Any) -> Any:
    x = _in_front(num_workers, dims[0], x)
    # Strides of their own kind: torch fills memory in its order, not in that of indices.
    masks = [
        torch.empty_like(row).bernoulli_(1 - p, generator=generator)
        for row, generator in zip(x, generators(), strict=True)
    ]
    return x * torch.stack(masks).div_(1 - p)


def _lstm_of_all(num_workers: int, dims: Dims, into: Any, *tensors: Tensor) -> Any:
    if any(dim is not None for dim in dims[4:]):
        return _stacked_lstm(into, *_all_in_front(num_workers, dims[1:], *tensors))
    # One model for all workers: they are more of the batch.
    x, h, c = _all_in_front(num_workers, dims[1:4], *tensors[:3])
    folded = (x.transpose(0, 1).flatten(1, 2), h.flatten(0, 1), c.flatten(0, 1), *tensors[3:])
    hs, h, c = _stacked_lstm(into, *(tensor.unsqueeze(0) for tensor in folded))
    h, c = (state.view(num_workers, -1, state.shape[-1]) for state in (h, c))
    return hs[0].unflatten(1, (num_workers, -1)).transpose(0, 1), h, c


def _stacked_lstm(
    into: Any, x: Tensor, h: Tensor, c: Tensor, w_input: Tensor, w_hidden: Tensor, *biases: Tensor
) -> Any:
    bias = sum(biases) if biases else None
    return StackedLstm.apply(x, h, c, w_input, w_hidden, bias, (into(w_input), into(w_hidden)))


def _cross_entropy_of_all(
    num_workers: int, dims: Dims, x: Tensor, target: Tensor, ignored: int, smoothing: float
) -> Any:
    x, target = _all_in_front(num_workers, dims, x, target)
    losses = F.cross_entropy(
        x.flatten(0, 1),
        target.flatten(0, 1),
        ignore_index=ignored,
        reduction="none",
        label_smoothing=smoothing,
    )
    num_targets = (target != ignored).flatten(1).sum(1)
    return losses.view(num_workers, -1).sum(1) / num_targets


class StackedLinear(Function):
    """x_W @ weight_W.T + bias_W for all workers in one batched product.

    vmap's own rule returns the gradient of the weight transposed, which costs a copy of it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, into: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return y with the leading dimensions of x."""
        ctx.save_for_backward(x, weight)
        ctx.into = into
        y = _product(x, weight, bias)
        # Not a view: autograd would refuse to have it changed in place, as by ReLU(inplace=True).
        return torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], weight.shape[1]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of those inputs that need one."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grads = _rows(grad)
        return (
            torch.bmm(grads, weight).view_as(x) if needs_x else None,
            _weight_gradient(grads, _rows(x), ctx.into) if needs_weight else None,
            grads.sum(1) if needs_bias else None,
            None,
        )


class StackedLstm(Function):
    """One layer and direction of an LSTM for all workers.

        a_t = x_t Wxᵀ + h_{t-1} Whᵀ + b         in four parts: ai, af, ag, ao
        i, f, o = σ(ai), σ(af), σ(ao)           g = tanh(ag)
        c_t = f c_{t-1} + i g                   h_t = o tanh(c_t)

    and backwards in time, with ∂h and ∂c what comes from t + 1 and from outside:

        ∂c += ∂h o (1 - tanh²(c_t))             ∂ao = ∂h tanh(c_t) o (1 - o)
        ∂ai = ∂c g i (1 - i)                    ∂af = ∂c c_{t-1} f (1 - f)
        ∂ag = ∂c i (1 - g²)                     ∂c_{t-1} = ∂c f,  ∂h_{t-1} = ∂a_t Wh
        ∂Wx = Σ_t ∂a_tᵀ x_t                     ∂Wh = Σ_t ∂a_tᵀ h_{t-1}

    Its own backward pass, because autograd's would add up a gradient of the weight at every time
    step, where one product over all of them does.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x_WTBI: Tensor,
        h: Tensor,
        c: Tensor,
        w_input: Tensor,
        w_hidden: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return h at all times, the last h and the last c."""
        bias, ctx.into = rest
        gates = _product(x_WTBI, w_input, bias).view(*x_WTBI.shape[:-1], -1)
        hs, cs, tanhs = (gates.new_empty(*gates.shape[:-1], h.shape[-1]) for _ in range(3))
        ctx.save_for_backward(x_WTBI, h, c, w_input, w_hidden, gates, hs, cs, tanhs)
        transposed = w_hidden.mT
        for t in range(gates.shape[1]):
            i, f, g, o = gates[:, t].baddbmm_(h, transposed).chunk(4, -1)
            for gate in (i, f, o):
                gate.sigmoid_()
            c = torch.mul(f, c, out=cs[:, t]).addcmul_(i, g.tanh_())
            h = torch.mul(o, torch.tanh(c, out=tanhs[:, t]), out=hs[:, t])
        return hs, h.clone(), c.clone()

    @staticmethod
    def backward(ctx: Any, grad_hs: Tensor, grad_h: Tensor, grad_c: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of those inputs that need one; states are cheap."""
        x, h, c, w_input, w_hidden, gates, hs, cs, tanhs = ctx.saved_tensors
        grad_gates = torch.empty_like(gates)
        for t in reversed(range(gates.shape[1])):
            i, f, g, o = gates[:, t].chunk(4, -1)
            to_i, to_f, to_g, to_o = grad_gates[:, t].chunk(4, -1)
            grad_h = grad_h + grad_hs[:, t]
            grad_c = grad_c + _tanh_backward(grad_h * o, tanhs[:, t])
            _sigmoid_backward(grad_h * tanhs[:, t], o, grad_input=to_o)
            _sigmoid_backward(grad_c * g, i, grad_input=to_i)
            _sigmoid_backward(grad_c * (cs[:, t - 1] if t else c), f, grad_input=to_f)
            _tanh_backward(grad_c * i, g, grad_input=to_g)
            grad_c = grad_c * f
            grad_h = torch.bmm(grad_gates[:, t], w_hidden)
        into_input, into_hidden = ctx.into
        needs_x, _, _, needs_input, needs_hidden, needs_bias, _ = ctx.needs_input_grad
        rows, before = _rows(grad_gates), torch.cat([h.unsqueeze(1), hs[:, :-1]], 1)
        return (
            torch.bmm(rows, w_input).view_as(x) if needs_x else None,
            grad_h,
            grad_c,
            _weight_gradient(rows, _rows(x), into_input) if needs_input else None,
            _weight_gradient(rows, _rows(before), into_hidden) if needs_hidden else None,
            rows.sum(1) if needs_bias else None,
            None,
        )


_sigmoid_backward: Any = torch.ops.aten.sigmoid_backward
_tanh_backward: Any = torch.ops.aten.tanh_backward


def _rows(x: Tensor) -> Tensor:
    """Return all but the first and the last dimension as one."""
    return x if x.dim() == 3 else x.reshape(x.shape[0], -1, x.shape[-1])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(_rows(x), weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), _rows(x), weight.mT)


def _weight_gradient(grads: Tensor, rows: Tensor, into: Tensor | None) -> Tensor:
    if into is None or into.dtype != grads.dtype:
        return torch.bmm(grads.mT, rows)
    torch.bmm(grads.mT, rows, out=into)
    return into


def _all_in_front(num_workers: int, dims: Dims, *tensors: Any) -> list[Any]:
    """Return tensors with workers as first dimension; the same for all where there was none."""
    return [_in_front(num_workers, dim, t) for dim, t in zip(dims, tensors, strict=False)]


def _in_front(num_workers: int, dim: int | None, tensor: Any) -> Any:
    if tensor is None or dim == 0:
        return tensor
    return tensor.expand(num_workers, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
