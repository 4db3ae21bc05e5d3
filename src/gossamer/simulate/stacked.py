"""Kernels of layers for all workers at once, on tensors whose first dimension is workers.

They run below vmap, where ordinary autograd records them. Arguments are the number of workers, the
dimension of workers in each further argument (None if it is not batched), and these arguments.
"""

# W: workers

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

Dims = Sequence[int | None]

_FEW_CLASSES = 16
"""With fewer classes, torch's softmax handles them one at a time. With classes in front of samples
it handles many samples at a time: with ten classes, 2048 samples take a fourth of the time."""


def linear_of_all(
    num_workers: int, dims: Dims, x: Tensor, weight: Tensor, bias: Any, into: Any
) -> Any:
    """Return x @ weight.T + bias of every worker."""
    x_dim, weight_dim, bias_dim, _ = dims
    if weight_dim is None:  # one model for all workers: one product over all of them
        y = F.linear(in_front(num_workers, x_dim, x), weight)
        if bias is None:
            return y
        many = bias if bias_dim is None else bias.movedim(bias_dim, 0)
        return y + many.reshape(-1, *[1] * (y.dim() - 2), y.shape[-1])
    x, weight, bias = all_in_front(num_workers, dims, x, weight, bias)
    return StackedLinear.apply(x, weight, bias, into(weight))


def attention_of_all(
    num_workers: int, dims: Dims, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Any
) -> Any:
    """Return every worker's attention, without dropout."""
    # Attention has no parameters: fold workers into the batch.
    q, k, v = all_in_front(num_workers, dims[:3], q, k, v)
    if mask is not None and dims[3] is None and mask.shape[:-2].numel() == 1:
        mask = mask.view(mask.shape[-2:])  # one mask for all: broadcast without copies
    elif mask is not None:
        mask = in_front(num_workers, dims[3], mask)
        mask = mask.reshape(num_workers, *[1] * (q.dim() - mask.dim()), *mask.shape[1:])
        mask = mask.expand(num_workers, q.shape[1], *mask.shape[2:]).flatten(0, 1)
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, mask, **options)
    return y.unflatten(0, (num_workers, -1))


def self_attention_of_all(
    num_workers: int, dims: Dims, projected: Tensor, num_heads: int, is_causal: bool
) -> Any:
    """Return every worker's attention, from queries, keys and values packed in one tensor.

    They are views of it; torch's own module copies each.
    """
    rows = in_front(num_workers, dims[0], projected).flatten(0, 1)
    parts = rows.unflatten(-1, (3, num_heads, -1)).unbind(2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return y.transpose(1, 2).flatten(2).unflatten(0, (num_workers, -1))


def dropout_of_all(num_workers: int, dims: Dims, x: Tensor, p: float, generators: Any) -> Any:
    """Return dropout of x, with each worker's mask from its own generator."""
    x = in_front(num_workers, dims[0], x)
    # With x's strides: torch fills random numbers in the order of memory, not of indices. With
    # other strides, a worker's mask would differ from the one that it draws by itself.
    masks = [
        torch.empty_like(row).bernoulli_(1 - p, generator=generator)
        for row, generator in zip(x, generators(), strict=True)
    ]
    return x * torch.stack(masks).div_(1 - p)


def batch_norm_of_all(
    num_workers: int,
    dims: Dims,
    x: Tensor,
    mean: Any,
    var: Any,
    weight: Any,
    bias: Any,
    options: Any,
) -> Any:
    """Return every worker's batch normalization, and update running statistics in place.

    Workers become channels, as vmap makes them for a convolution, so that nothing is copied between
    the two. vmap's own rule multiplies by the weight and adds the bias in passes of their own.
    """
    x, *parts = all_in_front(num_workers, dims, x, mean, var, weight, bias)
    own = dims[1] == dims[2] == 0 and all(part.is_contiguous() for part in parts[:2])
    if options["training"] and mean is not None and not own:
        # flatten() would copy them, and their update would be lost.
        raise NotImplementedError("running statistics are not buffers of each worker")
    mean, var, weight, bias = (None if part is None else part.flatten() for part in parts)
    y = F.batch_norm(x.movedim(0, 1).flatten(1, 2), mean, var, weight, bias, **options)
    return y.unflatten(1, (num_workers, -1)).movedim(1, 0)


def cross_entropy_of_all(
    num_workers: int, dims: Dims, x: Tensor, target: Tensor, ignored: int, smoothing: float
) -> Any:
    """Return every worker's mean over those of its targets that are not ignored."""
    x, target = all_in_front(num_workers, dims, x, target)
    outputs, classes = x.flatten(0, 1), target.flatten(0, 1)
    if outputs.dim() == 2 and outputs.shape[1] < _FEW_CLASSES:
        outputs, classes = outputs.T.unsqueeze(0), classes.unsqueeze(0)
    losses = F.cross_entropy(
        outputs,
        classes,
        ignore_index=ignored,
        reduction="none",
        label_smoothing=smoothing,
    )
    # Per worker, not over all: a worker's loss must not depend on how many targets others ignore.
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
        y = product(x, weight, bias)
        # Not a view: autograd rejects in-place changes of a view that a Function returns, as by
        # ReLU(inplace=True).
        return torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], weight.shape[1]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of those inputs that need one."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grads = as_rows(grad)
        return (
            torch.bmm(grads, weight).view_as(x) if needs_x else None,
            weight_gradient(grads, as_rows(x), ctx.into) if needs_weight else None,
            grads.sum(1) if needs_bias else None,
            None,
        )


def as_rows(x: Tensor) -> Tensor:
    """Return all but the first and the last dimension as one."""
    return x if x.dim() == 3 else x.reshape(x.shape[0], -1, x.shape[-1])


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias of every worker, with rows as one dimension."""
    if bias is None:
        return torch.bmm(as_rows(x), weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), as_rows(x), weight.mT)


def weight_gradient(grads: Tensor, rows: Tensor, into: Tensor | None) -> Tensor:
    """Return the gradient of a weight, written to ``into`` if its dtype is the same."""
    if into is None or into.dtype != grads.dtype:  # under autocast, gradients have another dtype
        return torch.bmm(grads.mT, rows)
    torch.bmm(grads.mT, rows, out=into)
    return into


def all_in_front(num_workers: int, dims: Dims, *tensors: Any) -> list[Any]:
    """Return tensors with workers as first dimension; expanded if they had none."""
    return [in_front(num_workers, dim, t) for dim, t in zip(dims, tensors, strict=False)]


def in_front(num_workers: int, dim: int | None, tensor: Any) -> Any:
    """Return one tensor with workers as first dimension."""
    if tensor is None or dim == 0:
        return tensor
    # Expanded rows share memory: kernels must not write to them in place.
    return tensor.expand(num_workers, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
