"""Elementwise updates in blocks that stay in cache: one pass over memory, whatever the update."""

# torch's optimizers call its kernels by these names; they have no public ones.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

_BLOCK_BYTES = 3 << 17
"""Block size per tensor and thread: two blocks fit in a cache of 1 MB. Smaller blocks take more
calls: with a third of it a step takes 1.5 times as long."""

_PLAIN = (Tensor, nn.Parameter)


def block_size(dtype: torch.dtype) -> int:
    """Return the most elements of a block."""
    return _BLOCK_BYTES // dtype.itemsize * torch.get_num_threads()


def by_dtype(lists: Sequence[Sequence[Tensor]]) -> tuple[dict[torch.dtype, list[int]], list[int]]:
    """Return the places, by dtype, of tensors that can be cut into blocks, and of the others.

    Args:
        lists: a list per kind of tensor, such as parameters and gradients, in one order of places;
            an empty one for a kind that is not used.
    """
    others: list[int] = []
    fitting: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for place, each in enumerate(zip(*filter(None, lists), strict=True)):
        dtype = each[0].dtype
        # Subclasses, such as DTensor, do not mix with the plain tensors of blocks.
        fits = all(
            type(t) in _PLAIN and t.is_cpu and t.dtype == dtype and t.is_contiguous() for t in each
        )
        (fitting[dtype] if fits else others).append(place)
    return fitting, others


def cut(lists: Sequence[list[Tensor]], most: int) -> Iterator[list[list[Tensor]]]:
    """Yield all elements once, in blocks of at most ``most``: small tensors share, large split."""
    start, num = 0, 0
    sizes = [tensor.numel() for tensor in lists[0]]
    for place, size in enumerate([*sizes, most + 1]):  # the last one ends the last block
        if num + size > most and place > start:
            yield [of_kind[start:place] for of_kind in lists]
            start, num = place, 0
        if size > most and place < len(sizes):
            flat = (of_kind[place].view(-1).split(most) for of_kind in lists)
            yield from ([[piece] for piece in pieces] for pieces in zip(*flat, strict=True))
            start = place + 1
        else:
            num += size


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
