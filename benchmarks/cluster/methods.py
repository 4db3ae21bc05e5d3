"""The methods that are compared: one row of METHODS each.

A setup function takes the model and the workers, and returns a function that does one complete
training step. It is called in its own process with torch.distributed initialised.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gossamer
from gossamer.optim import DiLoCo

LOCAL = "local"
"""The method that communicates nothing: its time is the compute in `ratio_to_limit`."""

Step = Callable[[], None]


@final
@dataclass(frozen=True, slots=True)
class Workers:
    """The workers, and their data."""

    rank: int
    world_size: int
    batch: Tensor


Setup = Callable[[nn.Module, Workers], Step]


def adam(params: Iterable[Tensor]) -> Optimizer:
    """Return the optimizer of all methods."""
    # Fused, because it takes the least time of the processors, which all hosts share.
    return torch.optim.Adam(params, lr=1e-4, fused=True)


def training_step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Step:
    """Return an ordinary step."""

    def step() -> None:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()

    return step


def local(model: nn.Module, workers: Workers) -> Step:
    """Local training without communication."""
    return training_step(model, adam(model.parameters()), workers.batch)


def ddp(
    model: nn.Module,
    workers: Workers,
    *,
    hook: Callable[[DistributedDataParallel], None] | None = None,
    bucket_mb: int | None = None,
) -> Step:
    """Torch's DistributedDataParallel with its defaults, or with a hook."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    if hook is not None:
        hook(wrapped)
    return training_step(wrapped, adam(wrapped.parameters()), workers.batch)


def hook_bf16(wrapped: DistributedDataParallel) -> None:
    """All-reduce gradients in bfloat16, by torch's hook."""
    # Under another name, because torch rejects this one without NCCL, although Gloo supports it.
    hook: Any = lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)  # noqa: E731
    wrapped.register_comm_hook(dist.group.WORLD, hook)


def hook_power_sgd(wrapped: DistributedDataParallel, *, rank: int) -> None:
    """All-reduce low-rank matrices instead of gradients, by torch's PowerSGD hook."""
    # From the third step on, the earliest possible, during the warm-up of the others.
    state = power_sgd.PowerSGDState(
        process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2
    )
    wrapped.register_comm_hook(state, power_sgd.powerSGD_hook)


def diloco(model: nn.Module, workers: Workers, *, period: int) -> Step:
    """Local steps, an average of the parameters every few, and an outer step on the change."""
    optimizer = adam(model.parameters())
    gossamer.decentralize(model, optimizer, "complete", algorithm="atc", every=period)
    outer = DiLoCo(model.parameters(), period)
    local_step = training_step(model, optimizer, workers.batch)

    def step() -> None:
        local_step()
        outer.step()

    return step


def post_local(model: nn.Module, workers: Workers, *, period: int) -> Step:
    """Torch's PostLocalSGD: local steps, and an all-reduce of the parameters every few."""
    wrapped = DistributedDataParallel(model)
    optimizer = local_sgd_optimizer(wrapped, adam(wrapped.parameters()), period)
    return training_step(wrapped, optimizer, workers.batch)


def local_sgd_optimizer(
    wrapped: DistributedDataParallel, optimizer: Optimizer, period: int
) -> Optimizer:
    """Return an optimizer that also averages parameters; gradients stay local from now on."""
    # Here, because torch warns about itself when this module is imported.
    from torch.distributed.optim import PostLocalSGDOptimizer

    state = post_local_sgd.PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=1,
        post_local_gradient_allreduce=False,
    )
    wrapped.register_comm_hook(state, post_local_sgd.post_localSGD_hook)
    averager = PeriodicModelAverager(period=period, warmup_steps=1)
    return PostLocalSGDOptimizer(optimizer, averager)


def decent_dp(model: nn.Module, workers: Workers, *, topology: str, node: int = 1) -> Step:
    """decent-dp's wrapper, which steps its optimizers inside the backward pass."""
    from decent_dp.ddp import DecentralizedDataParallel  # pyright: ignore[reportMissingImports]

    def optimizer(params: list[tuple[str, Tensor]]) -> Optimizer:
        return adam(param for _, param in params)

    wrapped = DecentralizedDataParallel(model, optimizer, topology=topology, _local_world_size=node)

    def step() -> None:
        wrapped(workers.batch).mean().backward()

    return step


def gossip(model: nn.Module, workers: Workers, *, topology: str, **options: Any) -> Step:
    """Gossamer, overlapped, as one line in an ordinary loop."""
    optimizer = adam(model.parameters())
    gossamer.decentralize(model, optimizer, topology, **options)
    return training_step(model, optimizer, workers.batch)


def gossip_between_nodes(model: nn.Module, workers: Workers, *, sliced: bool) -> Step:
    """DDP inside nodes and Gossamer between them; each rank sends all, or only its slice."""
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh(
        "cpu",
        (workers.world_size // ranks_per_node, ranks_per_node),
        mesh_dim_names=("between", "within"),
    )
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("within"))
    optimizer = adam(wrapped.parameters())
    within = mesh["within"] if sliced else None
    gossamer.decentralize(wrapped, optimizer, process_group=mesh["between"], within=within)
    return training_step(wrapped, optimizer, workers.batch)


one_peer = partial(gossip, topology="one_peer_exponential")

METHODS: dict[str, Setup] = {
    LOCAL: local,
    "ddp": ddp,
    "ddp(bf16)": partial(ddp, hook=hook_bf16),
    # In one bucket: over Gloo two ranks may issue the collectives of two in different orders.
    "ddp(power_sgd rank 4)": partial(ddp, hook=partial(hook_power_sgd, rank=4), bucket_mb=1000),
    "diloco(h=4)": partial(diloco, period=4),
    "post_local_sgd(h=4)": partial(post_local, period=4),
    "decent_dp(complete)": partial(decent_dp, topology="complete"),
    "decent_dp(ring)": partial(decent_dp, topology="ring"),
    "decent_dp(one-peer-exp)": partial(decent_dp, topology="one-peer-exp"),
    # Its graph divides by zero for nodes of one worker, so hosts are taken in pairs.
    "decent_dp(alternating-exp-ring)": partial(decent_dp, topology="alternating-exp-ring", node=2),
    "gossamer(complete)": partial(gossip, topology="complete"),
    "gossamer(ring)": partial(gossip, topology="ring"),
    "gossamer(one_peer_ring)": partial(gossip, topology="one_peer_ring"),
    "gossamer(one_peer_exponential)": one_peer,
    "gossamer(one_peer_exponential, atc)": partial(one_peer, order="atc"),
    "gossamer(one_peer_exponential, bf16)": partial(one_peer, wire="bf16"),
    "gossamer(one_peer_exponential, 8 bits)": partial(one_peer, wire="modulo(bits=8)"),
    "gossamer(one_peer_exponential, 4 bits)": partial(one_peer, wire="modulo(bits=4)"),
    "gossamer(one_peer_exponential, 8 bits, 4 fragments)": partial(
        one_peer, wire="modulo(bits=8)", fragments=4
    ),
    "gossamer(ring, 8 bits)": partial(gossip, topology="ring", wire="modulo(bits=8)"),
    "gossamer(aer)": partial(gossip, topology="aer(workers_per_node=2)"),
}

NODE_METHODS: dict[str, Setup] = {
    "ddp and gossamer": partial(gossip_between_nodes, sliced=False),
    "ddp and gossamer(within)": partial(gossip_between_nodes, sliced=True),
}
"""Methods that need nodes of several hosts."""


def missing(method: str) -> str:
    """Return why a method cannot be measured here; empty if it can."""
    if method.startswith("decent_dp") and importlib.util.find_spec("decent_dp") is None:
        return "decent-dp is not installed; pip install 'gossamer[peers]'"
    return ""
