"""Preconditions of gossip that one rank can check by itself, before anything is sent."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from gossamer.errors import UserError, quoted
from gossamer.gossip.alone import group_of_one, is_alone
from gossamer.gossip.buckets import is_dense
from gossamer.gossip.guard import held_by, is_guarded
from gossamer.gossip.shards import is_a, local, shard_group
from gossamer.gossip.wrapper_watch import is_wrapped_over, ranks_in_both, ranks_shared_with
from gossamer.wire import Wire

_log = logging.getLogger(__name__)


def check_positive(name: str, value: object, positive: bool) -> None:
    """Raise if an argument is not above 0."""
    if not positive:
        raise UserError(f"{name} must be above 0, got {value}; leave it out for the default")


def check_device(wire: Wire, device: torch.device) -> None:
    """Raise if a wire format does not work on the device of the parameters."""
    if wire.on_cpu_only and device.type != "cpu":
        raise UserError(
            f"{wire} needs parameters on the CPU, got them on {device}; use wire='bf16'"
        )


def to_group(process_group: ProcessGroup | DeviceMesh | None, model: nn.Module) -> ProcessGroup:
    """Return the group of the ranks that gossip; a group of one for a single process."""
    if process_group is not None:
        return _group_of(process_group, "along which replicas differ, as in mesh['replica']")
    if not dist.is_available() or not dist.is_initialized():
        # Tensors on other devices are sent by the backend of torch's own group: it must exist.
        if is_alone() and all(p.device.type == "cpu" for p in model.parameters()):
            _log.info("no process group is initialized: one worker, without others to mix with")
            return group_of_one()
        raise UserError(
            "decentralize needs a process group, and none is initialized; call "
            "torch.distributed.init_process_group() under torchrun, or pass process_group="
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _group_of(group: ProcessGroup | DeviceMesh, meant: str) -> ProcessGroup:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise UserError(f"a mesh must have one dimension, got {group.ndim}; pass the part {meant}")
    return group.get_group()


def to_within(
    within: ProcessGroup | DeviceMesh | None, model: nn.Module, between: ProcessGroup
) -> ProcessGroup | None:
    """Return the group of the ranks that hold this rank's replica; None for this rank alone.

    Args:
        within: the user's argument: ranks that hold the same replica, because DDP connects them.
        model: if it is sharded, the group is read from its shards.
        between: the ranks that gossip.
    """
    sharded_over = shard_group(model, between)
    if within is None:
        return sharded_over
    if sharded_over is not None:
        raise UserError(
            "within= is for ranks that hold a full replica each, got it with a model whose shards "
            "name their ranks; leave it out"
        )
    group = _group_of(within, "inside a node, as in mesh['within']")
    ranks = {*dist.get_process_group_ranks(group)}
    if shared := ranks_in_both(ranks, between):
        raise UserError(
            "the ranks within a node must not gossip with each other, got ranks "
            f"{shared} in both groups; with a mesh of nodes and ranks, within=mesh['within'] and "
            "process_group=mesh['between']"
        )
    if len(ranks) > 1 and not is_wrapped_over(ranks, model):
        raise UserError(
            "the ranks within a node must average their gradients, got within= with a model that "
            f"no DDP over ranks {sorted(ranks)} wraps; wrap it before decentralize(), by "
            "DistributedDataParallel(model, process_group=...), or leave within= out"
        )
    return group


def to_survival(on_failure: str) -> bool:
    """Return whether training continues when a worker is lost."""
    if on_failure not in ("raise", "continue"):
        raise UserError(
            f"on_failure must be 'raise' or 'continue', got {quoted(on_failure)}; 'continue' "
            "trains on with the survivors when a worker is lost"
        )
    return on_failure == "continue"


def check_survival(
    topology: object, process_group: ProcessGroup, parameter: Tensor, num_shards: int
) -> None:
    """Raise if training could not continue after the loss of a rank."""
    if not isinstance(topology, str) and not callable(topology):
        raise UserError(
            "on_failure='continue' needs a topology for any number of workers, got a "
            f"{type(topology).__name__} on {process_group.size()}; pass a string, or a function "
            "that returns one for a number of workers"
        )
    if num_shards > 1:
        raise UserError(
            "on_failure='continue' needs each replica on one rank, got replicas on "
            f"{num_shards} ranks of a node, which are lost with one of them; use on_failure='raise'"
        )
    if parameter.device.type != "cpu":
        raise UserError(
            "on_failure='continue' needs parameters on the CPU, which are sent over Gloo, got "
            f"them on {parameter.device}; use on_failure='raise'"
        )
    store = process_group.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    # Only its repr tells whether this process serves the store: then survivors would lose it.
    if "server=TCPServer" in repr(store):
        raise UserError(
            "on_failure='continue' needs a store that no worker holds, because it ends with its "
            f"process, got one in the process of rank {process_group.rank()}; start workers with "
            "`gossamer launch`, or pass init_process_group a TCPStore of another process"
        )


def check_wrapper(model: nn.Module, process_group: ProcessGroup) -> None:
    """Raise if DDP or FSDP already synchronizes ranks of the group.

    DDP within a node and gossip between nodes is allowed: the two groups share only this rank.
    """
    if any(
        is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel")
        for module in model.modules()
    ):
        raise UserError(
            "parameters must be tensors or DTensors that keep their shapes, got a model wrapped in "
            "FullyShardedDataParallel, which flattens them; use fully_shard(model, "
            "mesh=mesh['within']), which is FSDP2"
        )
    for module in model.modules():
        if not isinstance(module, DistributedDataParallel):
            continue
        shared = ranks_shared_with(module, process_group)
        if shared:
            raise UserError(
                "DDP and gossip must not connect the same ranks, got a model wrapped in DDP over "
                f"ranks {shared} of the gossip's group; train the model without the wrapper, or "
                "pass a process_group= with one rank of each DDP group"
            )


def trained_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the parameters to mix, after all checks of them and of the optimizers."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _check_held(named.values(), optimizers)
    for optimizer in optimizers:
        _check_optimizer(optimizer)
    devices = sorted({str(p.device) for p in named.values()})
    if len(devices) > 1:
        raise UserError(
            f"all parameters must be on one device, got {devices}; move the model to one of them"
        )
    addresses: set[int] = set()
    for name, parameter in named.items():
        _check_parameter(name, parameter, addresses)
    return list(named.values())


def _check_held(trained: Collection[Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Raise if optimizers hold parameters of another model, or one parameter twice."""
    known = {id(p) for p in trained}
    held = [p for p in held_by(optimizers) if p.requires_grad]
    strangers = sum(id(p) not in known for p in held)
    if not trained or strangers or not optimizers:
        raise UserError(
            "the optimizer must hold parameters of the model, and the model trainable ones, got "
            f"{strangers} foreign and {len(trained)} trainable parameters; "
            "build the optimizer from this model's parameters()"
        )
    twice = len(held) - len({id(p) for p in held})
    if twice:
        raise UserError(
            f"each parameter must be in one optimizer, got {twice} in two; split the parameters "
            "among them"
        )


def _check_optimizer(optimizer: Optimizer) -> None:
    if isinstance(optimizer, LBFGS):
        raise UserError(
            "an optimizer must take one gradient per step, got LBFGS, which evaluates the closure "
            "again at points that other workers do not know; use SGD or Adam"
        )
    if "_optimizer_step_pre_hooks" not in vars(optimizer):  # set by torch's constructor
        raise UserError(
            f"an optimizer must support step hooks, got {type(optimizer).__name__}, which only "
            "wraps another optimizer; pass the wrapped one, as optimizer.optimizer"
        )


def _check_parameter(name: str, parameter: Tensor, addresses: set[int]) -> None:
    if is_guarded(parameter):
        raise UserError(
            f"a parameter can gossip once, got {name}, which already does; close() the first gossip"
        )
    if isinstance(parameter, UninitializedParameter):
        raise UserError(
            f"parameters must have a shape, got {name}, which is not initialized; "
            "run the model once before decentralize()"
        )
    held = local(parameter)
    if not is_dense(held):
        raise UserError(
            f"parameters must occupy their memory without gaps or overlap, got {name} with shape "
            f"{tuple(parameter.shape)} and strides {parameter.stride()}; assign a contiguous copy"
        )
    if held.numel() and held.data_ptr() in addresses:
        raise UserError(
            f"tied parameters must be one object, got {name}, which shares the memory of another; "
            "assign the parameter itself, as in a.weight = b.weight"
        )
    addresses.add(held.data_ptr())
