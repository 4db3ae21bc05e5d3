"""DDP around parameters that gossip: training through it makes all gradients equal.

Gossip would then exchange copies of one model, and nothing would look wrong. A wrapper around the
model, or around a part or a whole that it belongs to, cannot be seen from the model; so wrappers
are looked for among all objects, when gossip starts and once more at its first step.
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
    """Return the ranks that a wrapper connects as a process group does, if more than this one."""
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
    """Refuses a forward pass through a wrapper that averages gradients over ranks that gossip.

    A wrapper that only exists does no harm, and neither does one whose ranks do not gossip with
    each other, as inside a node.

    Args:
        trained: the parameters that gossip.
        process_group: the ranks that do.
    """

    def __init__(self, trained: Iterable[Tensor], process_group: ProcessGroup) -> None:
        self._trained = {id(parameter) for parameter in trained}
        self._process_group = process_group
        self._hooks: dict[int, RemovableHandle] = {}
        self.look()

    def look(self) -> None:
        """Look for wrappers."""
        if not dist.is_initialized():  # which DDP needs
            return
        for ddp in instances_of(DistributedDataParallel):
            wraps = any(id(parameter) in self._trained for parameter in ddp.parameters())
            if wraps and id(ddp) not in self._hooks and ranks_shared_with(ddp, self._process_group):
                self._hooks[id(ddp)] = ddp.register_forward_pre_hook(_refuse)

    def release(self) -> None:
        """Let wrappers be used again."""
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
