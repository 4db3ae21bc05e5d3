"""Detection of DDP around parameters that gossip: training through it makes all gradients equal.

Gossip would then exchange copies of one model, without any visible error. A wrapper around the
model, a part of it, or a module that contains it cannot be found from the model. So all live
objects are scanned for wrappers, when gossip starts and again at its first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gossamer.errors import UserError
from gossamer.gossip.instances import instances_of


def ranks_shared_with(ddp: DistributedDataParallel, process_group: ProcessGroup) -> list[int]:
    """Return the ranks that a wrapper shares with a process group, if more than this one."""
    return ranks_in_both(dist.get_process_group_ranks(ddp.process_group), process_group)


def ranks_in_both(ranks: Iterable[int], process_group: ProcessGroup) -> list[int]:
    """Return the ranks that are also in a process group, if more than this one."""
    shared = {*ranks} & {*dist.get_process_group_ranks(process_group)}
    return sorted(shared) if len(shared) > 1 else []


def is_wrapped_over(ranks: set[int], model: nn.Module) -> bool:
    """Whether a wrapper averages all gradients of a model over these ranks."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return any(
        trained <= {id(parameter) for parameter in ddp.parameters()}
        and {*dist.get_process_group_ranks(ddp.process_group)} == ranks
        for ddp in instances_of(DistributedDataParallel)
    )


@final
class WrapperWatch:
    """Rejects a forward pass through a wrapper that averages gradients over ranks that gossip.

    A wrapper that is never called is harmless, and so is one whose ranks do not gossip with each
    other, as inside a node.

    Args:
        trained: the parameters that are mixed.
        process_group: the ranks that gossip.
    """

    def __init__(self, trained: Iterable[Tensor], process_group: ProcessGroup) -> None:
        self._trained = {id(parameter) for parameter in trained}
        self._process_group = process_group
        self._hooks: dict[int, RemovableHandle] = {}
        self.scan()

    def scan(self) -> None:
        """Find wrappers among all live objects, and hook their forward passes."""
        if not dist.is_initialized():  # no DDP can exist
            return
        for ddp in instances_of(DistributedDataParallel):
            wraps = any(id(parameter) in self._trained for parameter in ddp.parameters())
            if wraps and id(ddp) not in self._hooks and ranks_shared_with(ddp, self._process_group):
                self._hooks[id(ddp)] = ddp.register_forward_pre_hook(_refuse)

    def release(self) -> None:
        """Allow training through wrappers again."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def _refuse(ddp: DistributedDataParallel, args: Any) -> None:
    if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        raise UserError(
            "training must go through the model that gossips, got a forward pass through a DDP "
            "wrapper of it, which averages gradients over the same ranks: call the model itself "
            "(ddp.module) in the loop, or turn off the wrapper of your framework"
        )
