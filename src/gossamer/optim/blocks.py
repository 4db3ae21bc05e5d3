"""Elementwise updates in blocks that stay in cache: one pass over memory, whatever the update."""

# torch's optimizers call its kernels by these names; they have no public ones.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

_BLOCK_BYTES = 3 << 17
"""Block size per tensor and thread: two blocks fit in a cache of 1 MB. Smaller blocks take more
calls: with a third of it a step takes 1.5 times as long."""

_PLAIN = (Tensor, nn.Parameter)


class Tensors(NamedTuple):
    """The tensors that a step reads and writes, by parameter."""

    parameters: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    grad_means: list[Tensor] = []  # noqa: RUF012 - never changed
    """Means of gradients over steps; empty where the update has none."""

    def at(self, places: Sequence[int]) -> Tensors:
        """Return the tensors of some parameters."""
        return Tensors(*([of_kind[i] for i in places] if of_kind else [] for of_kind in self))


def block_size(dtype: torch.dtype) -> int:
    """Return the most elements of a block."""
    return _BLOCK_BYTES // dtype.itemsize * torch.get_num_threads()


def by_dtype(tensors: Tensors) -> tuple[dict[torch.dtype, list[int]], list[int]]:
    """Return the places, by dtype, of tensors that can be cut into blocks, and of the others."""
    others: list[int] = []
    fitting: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for place, each in enumerate(zip(*filter(None, tensors), strict=True)):
        dtype = each[0].dtype
        # Subclasses, such as DTensor, do not mix with the plain tensors of blocks.
        fits = all(
            type(t) in _PLAIN and t.is_cpu and t.dtype == dtype and t.is_contiguous() for t in each
        )
        (fitting[dtype] if fits else others).append(place)
    return fitting, others


def cut(tensors: Tensors, most: int) -> Iterator[Tensors]:
    """Yield all elements once, in blocks of at most ``most``: small tensors share, large split."""
    start, num = 0, 0
    sizes = [parameter.numel() for parameter in tensors.parameters]
    for place, size in enumerate([*sizes, most + 1]):  # the last one ends the last block
        if num + size > most and place > start:
            yield tensors.at(range(start, place))
            start, num = place, 0
        if size > most and place < len(sizes):
            flat = (of_kind[place].view(-1).split(most) for of_kind in filter(None, tensors))
            for pieces in zip(*flat, strict=True):
                yield Tensors(*([piece] for piece in pieces))
            start = place + 1
        else:
            num += size


def decayed_(
    parameters: list[Tensor],
    grads: list[Tensor],
    lr: float,
    weight_decay: float,
    decoupled: bool,
) -> list[Tensor]:
    """Decay the weights: AdamW's in place, Adam's in the gradients that are returned."""
    if not decoupled:
        return list(torch._foreach_add(grads, parameters, alpha=weight_decay))
    torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    return grads


def move_(
    parameters: list[Tensor],
    first: list[Tensor] | tuple[Tensor, ...],
    second: list[Tensor] | tuple[Tensor, ...],
    count: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Move parameters by Adam's step along moments that were updated ``count`` times."""
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, math.sqrt(1 - betas[1] ** count))
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(parameters, first, denominators, -lr / (1 - betas[0] ** count))


def fused_(  # noqa: PLR0913 - the kernel's scalars
    parameters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Run torch's fused Adam or AdamW; ``step``, which is not changed, is of bias corrections."""
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        parameters,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(parameters),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
