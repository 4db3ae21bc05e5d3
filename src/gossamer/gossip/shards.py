"""Parameters that FSDP2 shards over the ranks of a node.

``fully_shard`` makes every parameter a DTensor and owns the storage of its local tensor. It may
replace that tensor (a first forward pass pads it, loading replaces it), and leaves unsharded
parameters in the modules after a forward pass without a backward pass. So a local tensor must be
fetched whenever it is needed, never cached, and modules are resharded before it is read or written:
the next forward pass would otherwise compute with the old unsharded parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gossamer.errors import UserError
from gossamer.gossip.wrapper_watch import ranks_in_both

_TENSOR, _FSDP = "torch.distributed.tensor", "torch.distributed.fsdp"


def is_a(thing: object, module: str, name: str) -> bool:
    """Whether an object is of a class, without importing its module, which takes long."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(thing, getattr(loaded, name))


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds only a shard of a tensor."""
    return is_a(tensor, _TENSOR, "DTensor")


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory and version counter."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()


def locals_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return this rank's parts of tensors; the tensors themselves if none is sharded."""
    return [local(t) for t in tensors] if any(map(is_sharded, tensors)) else tensors


def sharded_as(shard: Tensor, parameter: Any) -> Tensor:
    """Return a DTensor with this shard, sharded as a parameter is.

    So distributed checkpoints, which save the parameter correctly, also save this correctly.
    """
    if not is_sharded(parameter):
        return shard
    return sys.modules[_TENSOR].DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` was called on."""
    return [module for module in model.modules() if is_a(module, _FSDP, "FSDPModule")]


def reshard(modules: Iterable[Any]) -> None:
    """Reshard modules in which a forward pass has left unsharded parameters."""
    for module in modules:
        module.reshard()


def shard_group(model: nn.Module, between: ProcessGroup) -> ProcessGroup | None:
    """Return the group of ranks that the model is sharded over; None if it is not sharded.

    Args:
        model: raises if its shards are not those of ``fully_shard`` within a node.
        between: the ranks that gossip; it may share only this rank with the group.
    """
    modules = sharded_modules(model)
    reshard(modules)
    by_fsdp = {id(p) for module in modules for p in module.parameters()}
    parameters = dict(model.named_parameters())
    meshes: list[Any] = []
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            meshes.append(_mesh_of(name, parameter, id(parameter) in by_fsdp))
            if meshes[-1] != meshes[0]:
                raise UserError(
                    f"all parameters must be sharded over the same ranks, got {name} on another "
                    "mesh than the first; pass one mesh to every fully_shard()"
                )
    if not meshes:
        return None
    for name, parameter in parameters.items():
        if parameter.requires_grad and not is_sharded(parameter):
            raise UserError(
                "either all trained parameters must be sharded or none, got "
                f"{name}, which is not, and whose gradient FSDP does not average; call "
                "fully_shard() on the root model after its parts"
            )
    group = meshes[0].get_group()
    if shared := ranks_in_both(dist.get_process_group_ranks(group), between):
        raise UserError(
            "FSDP and gossip must not connect the same ranks, got a model sharded over ranks "
            f"{shared} of the gossip's group; with a mesh of nodes and ranks, "
            "fully_shard(model, mesh=mesh['within']) and process_group=mesh['between']"
        )
    return group


def _mesh_of(name: str, parameter: Any, by_fsdp: bool) -> Any:
    """Return the mesh that a parameter is sharded over; raise if gossip does not support it."""
    mesh, placements = parameter.device_mesh, parameter.placements
    if not by_fsdp:
        raise UserError(
            f"parameters must be plain tensors, or shards of FSDP2, got {name}, a DTensor that "
            "fully_shard() does not own, as tensor parallelism makes them; use plain tensors, "
            "or fully_shard(model, mesh=mesh['within'])"
        )
    if mesh.ndim != 1 or not placements[0].is_shard():
        raise UserError(
            "shards must be those of fully_shard() on a mesh of one dimension, got "
            f"{name}, placed as {placements} on one of {mesh.ndim}, as HSDP and tensor parallelism "
            "do; shard over the ranks of a node only, and let gossip connect nodes"
        )
    return mesh
