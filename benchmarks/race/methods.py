"""The methods that are compared: one row of METHODS each.

A setup function takes the model, the loss and the learning rate, and returns a function that does
one complete training step with an input and its target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import gossamer
from benchmarks.cluster import methods as cluster
from gossamer.optim import AccumAdamW, DiLoCo

Step = Callable[[Tensor, Tensor], None]
Loss = Callable[[Tensor, Tensor], Tensor]
Setup = Callable[[nn.Module, Loss, float], Step]

REFERENCE = "ddp"
"""The method whose final loss is the target of the others."""

_BETAS, _DECAY = (0.9, 0.99), 0.1


def adamw(parameters: Iterable[Tensor], lr: float) -> Optimizer:
    """Return the optimizer of averaged gradients, and of local steps."""
    return AdamW(parameters, lr=lr, betas=_BETAS, weight_decay=_DECAY)


def accum_adamw(parameters: Iterable[Tensor], lr: float) -> AccumAdamW:
    """Return the optimizer of gossip."""
    return AccumAdamW(parameters, lr=lr, betas=_BETAS, weight_decay=_DECAY)


def ordinary(model: nn.Module, loss: Loss, optimizer: Optimizer) -> Step:
    """Return a step of an ordinary loop."""

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def ddp(
    model: nn.Module,
    loss: Loss,
    lr: float,
    *,
    hook: Callable[[DistributedDataParallel], None] | None = None,
    bucket_mb: int | None = None,
) -> Step:
    """Torch's DistributedDataParallel, with a hook or without."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    if hook is not None:
        hook(wrapped)
    return ordinary(wrapped, loss, adamw(wrapped.parameters(), lr))


def post_local(model: nn.Module, loss: Loss, lr: float, *, period: int) -> Step:
    """Torch's PostLocalSGD."""
    wrapped = DistributedDataParallel(model)
    optimizer = cluster.local_sgd_optimizer(wrapped, adamw(wrapped.parameters(), lr), period)
    return ordinary(wrapped, loss, optimizer)


def diloco(model: nn.Module, loss: Loss, lr: float, *, period: int) -> Step:
    """Local steps, an average every few, and an outer step on the change."""
    optimizer = adamw(model.parameters(), lr)
    gossamer.decentralize(model, optimizer, "complete", algorithm="atc", every=period)
    outer, local_step = DiLoCo(model.parameters(), period), ordinary(model, loss, optimizer)

    def step(inputs: Tensor, targets: Tensor) -> None:
        local_step(inputs, targets)
        outer.step()

    return step


def decent_dp(model: nn.Module, loss: Loss, lr: float, *, topology: str) -> Step:
    """decent-dp's wrapper, which steps inside the backward pass, with the optimizer of gossip."""
    from decent_dp.ddp import DecentralizedDataParallel  # pyright: ignore[reportMissingImports]

    def optimizer(params: list[tuple[str, Tensor]]) -> Optimizer:
        chosen = accum_adamw((param for _, param in params), lr)
        chosen.set_num_workers(dist.get_world_size())  # as decentralize() does
        return chosen

    wrapped = DecentralizedDataParallel(model, optimizer, topology=topology, _local_world_size=1)

    def step(inputs: Tensor, targets: Tensor) -> None:
        loss(wrapped(inputs), targets).backward()

    return step


def gossip(model: nn.Module, loss: Loss, lr: float, **options: Any) -> Step:
    """Gossamer as one line in an ordinary loop; overlapped (awc) by default."""
    optimizer = accum_adamw(model.parameters(), lr)
    gossamer.decentralize(model, optimizer, "one_peer_exponential", **options)
    return ordinary(model, loss, optimizer)


METHODS: dict[str, Setup] = {
    REFERENCE: ddp,
    "ddp(bf16)": partial(ddp, hook=cluster.hook_bf16),
    # In one bucket: over Gloo two ranks may issue the collectives of two in different orders.
    "ddp(power_sgd rank 4)": partial(
        ddp, hook=partial(cluster.hook_power_sgd, rank=4), bucket_mb=1000
    ),
    "post_local_sgd(h=4)": partial(post_local, period=4),
    "diloco(h=16)": partial(diloco, period=16),
    "decent_dp(one-peer-exp)": partial(decent_dp, topology="one-peer-exp"),
    "gossamer": gossip,
    "gossamer(8 bits)": partial(gossip, wire="modulo(bits=8)"),
    "gossamer(4 bits)": partial(gossip, wire="modulo(bits=4)"),
    "gossamer(4 bits, atc)": partial(gossip, wire="modulo(bits=4)", algorithm="atc"),
}
