"""Which parameters gossip, what all ranks must have in common, and a guard over both."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from gossamer.errors import UserError
from gossamer.gossip.buckets import is_dense

_GUARDED: set[int] = set()
"""The ids of parameters that a gossip mixes, and keeps alive until close(). Not an attribute of
theirs, which would be pickled with them."""


def trained(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the parameters to mix, after all checks that need no communication."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    known = {id(p) for p in named.values()}
    held = [p for p in held_by(optimizers) if p.requires_grad]
    strangers = sum(id(p) not in known for p in held)
    if not named or strangers or not optimizers:
        raise UserError(
            "the optimizer must hold parameters of the model, and the model trainable ones, got "
            f"{strangers} foreign and {len(named)} trainable parameters; "
            "build the optimizer from this model's parameters()"
        )
    twice = len(held) - len({id(p) for p in held})
    if twice:
        raise UserError(
            f"each parameter must be in one optimizer, got {twice} in two; give each its own"
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise UserError(
            "an optimizer must take one gradient per step, got LBFGS, which evaluates the closure "
            "again at points that other workers do not know; use SGD or Adam"
        )
    for optimizer in optimizers:
        if "_optimizer_step_pre_hooks" not in vars(optimizer):  # where torch keeps them
            raise UserError(
                f"an optimizer must take hooks around its step, got {type(optimizer).__name__}, "
                "which only calls another one's; pass the one inside, as optimizer.optimizer"
            )
    devices = sorted({str(p.device) for p in named.values()})
    if len(devices) > 1:
        raise UserError(
            f"all parameters must be on one device, got {devices}; move the model to one of them"
        )
    addresses: set[int] = set()
    for name, parameter in named.items():
        _check_parameter(name, parameter, addresses)
    return list(named.values())


def held_by(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return all parameters of these optimizers."""
    return [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]


def check_wrapper(model: nn.Module, process_group: ProcessGroup) -> None:
    """Raise where something else already keeps these ranks' parameters in step.

    DDP within a node and gossip between nodes is fine: then the two groups share this rank alone.
    """
    if any(
        _is_a(module, "torch.distributed.fsdp", name)
        for module in model.modules()
        for name in ("FSDPModule", "FullyShardedDataParallel")
    ):
        raise UserError(
            "decentralize moves parameters into storage of its own, got a model sharded by FSDP, "
            "which owns the storage of its shards; use DDP within a node, or no wrapper"
        )
    for module in model.modules():
        if not isinstance(module, DistributedDataParallel):
            continue
        of_ddp = dist.get_process_group_ranks(module.process_group)
        shared = set(of_ddp) & set(dist.get_process_group_ranks(process_group))
        if len(shared) > 1:
            raise UserError(
                "DDP and gossip must not connect the same ranks, got a model wrapped in DDP over "
                f"ranks {sorted(shared)} of the gossip's group; pass the model itself, or a "
                "process_group= with one rank of each DDP group"
            )


def _is_a(thing: object, module: str, name: str) -> bool:
    """Whether it is of a class whose module takes long to import, and need not be imported here."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(thing, getattr(loaded, name))


def _check_parameter(name: str, parameter: Tensor, addresses: set[int]) -> None:
    if id(parameter) in _GUARDED:
        raise UserError(
            f"a parameter can gossip once, got {name}, which already does; close() the first gossip"
        )
    if isinstance(parameter, UninitializedParameter):
        raise UserError(
            f"parameters must have a shape, got {name}, which is not initialized; "
            "run the model once before decentralize()"
        )
    if _is_a(parameter, "torch.distributed.tensor", "DTensor"):
        raise UserError(
            f"parameters must be whole on every rank, got {name}, a DTensor, whose storage belongs "
            "to the mesh that shards it; use plain tensors"
        )
    if not is_dense(parameter):
        raise UserError(
            f"parameters must occupy their memory without gaps or overlap, got {name} with shape "
            f"{tuple(parameter.shape)} and strides {parameter.stride()}; assign a contiguous copy"
        )
    if parameter.numel() and parameter.data_ptr() in addresses:
        raise UserError(
            f"tied parameters must be one object, got {name}, which shares the memory of another; "
            "assign the parameter itself, as in a.weight = b.weight"
        )
    addresses.add(parameter.data_ptr())


def facts_about(model: nn.Module) -> dict[str, str]:
    """Return what must be the same on all ranks before a byte of this model is sent."""
    tensors = {
        **{f"parameter {name}": parameter for name, parameter in model.named_parameters()},
        **{f"buffer {name}": buffer for name, buffer in model.named_buffers()},
    }
    facts = {name: _describe(tensor) for name, tensor in tensors.items()}
    # The same tensors in another order would land in other places of a bucket.
    facts["the order of tensors"] = hashlib.blake2b(str([*tensors]).encode()).hexdigest()[:8]
    return facts


def _describe(tensor: Tensor) -> str:
    """Say all that decides how a tensor travels.

    >>> import torch
    >>> _describe(torch.zeros(2, 3))
    'float32 [2, 3]'
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = "" if tensor.is_contiguous() else f" with strides {[*tensor.stride()]}"
    trained = " (trained)" if tensor.requires_grad else ""
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{dtype} {[*tensor.shape]}{strides}{trained}{device}"


@final
class Guard:
    """Notices parameters that are no longer what is mixed, or no longer what is being sent.

    Sees a replaced parameter, replaced storage, and every change that autograd sees. A change
    through ``.data`` has no trace. Until it is released, no other gossip gets these parameters.

    Args:
        model: what owns the parameters.
        optimizers: what trains them.
        trained: the parameters that are mixed.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], trained: Sequence[Tensor]
    ) -> None:
        self._optimizers = optimizers
        self._num_held = len(held_by(optimizers))
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = [names[id(p)] for p in trained]
        self._trained = trained
        self._slots = [
            (vars(module)["_parameters"], name, parameter, f"{prefix}.{name}".lstrip("."))
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._addresses = [p.data_ptr() for p in trained]
        self._versions: list[int] = []
        self.renew()
        _GUARDED.update(map(id, trained))

    def release(self) -> None:
        """Let another gossip have the parameters."""
        _GUARDED.difference_update(map(id, self._trained))

    def renew(self) -> None:
        """Take the parameters as they are now for what is being sent."""
        self._versions = [p._version for p in self._trained]

    def check_trained(self) -> None:
        """Raise where parameters are trained that are not mixed: workers would drift apart."""
        added = len(held_by(self._optimizers)) - self._num_held
        unfrozen = sum(parameter.requires_grad for parameter in self._frozen)
        if added or unfrozen:
            raise UserError(
                "parameters must be trainable and in the optimizer when decentralize() is called, "
                f"got {unfrozen} unfrozen and {added} added since; close() this gossip and call "
                "decentralize() again"
            )
        replaced = [path for owner, name, p, path in self._slots if owner.get(name) is not p]
        if not replaced:
            addresses = [p.data_ptr() for p in self._trained]
            if addresses == self._addresses:
                return
            pairs = zip(addresses, self._addresses, self._names, strict=True)
            replaced = [name for now, then, name in pairs if now != then]
        raise UserError(
            "parameters must stay in the storage that is sent, got a replaced "
            f"{replaced[0]} (by .to(), load_state_dict(assign=True) or an assignment); "
            "close() before that and call decentralize() again after it"
        )

    def check_unchanged(self) -> None:
        """Raise where parameters changed while they were being sent."""
        versions = [p._version for p in self._trained]
        if versions != self._versions:
            pairs = zip(versions, self._versions, self._names, strict=True)
            changed = next(name for now, then, name in pairs if now != then)
            raise UserError(
                "parameters must not change between two steps, because they are being sent, got a "
                f"changed {changed}; change them inside `with gossip.drained(keep_changes=True):`, "
                "or `with gossip.drained():` to have them put back"
            )
