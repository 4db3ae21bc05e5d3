"""Process groups of our own, and the work that is begun on them.

They are made on the store of the group that is passed in, so what users send or reduce on theirs
can never be taken for ours. Ranks here are ranks within that group.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import partial
from typing import cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import PrefixStore

from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.notices import name_ranks


@final
class Connections:
    """Opens process groups for one rank, and explains the failures of work on them.

    Args:
        process_group: the ranks that take part; nothing is sent on it.
        detector: who explains what fails; its timeout is how long a message or all-reduce may take,
            from when it is begun.
        device: where the tensors live. CPU tensors travel over Gloo, others over the group's
            own backend.
    """

    def __init__(
        self, process_group: ProcessGroup, detector: FailureDetector, device: torch.device
    ) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self.everyone = tuple(range(self.size))
        self.device = device
        self.on_cpu = device.type == "cpu"
        self.detector = detector
        self._base = process_group
        self._opened: list[ProcessGroup] = []

    def open(self, members: tuple[int, ...], purpose: str) -> ProcessGroup:
        """Connect these ranks; waits for them, so all open their groups in one order."""
        try:
            # A backend by itself has the methods that we call.
            group = cast(ProcessGroup, self._connect(members, purpose))
        except RuntimeError as error:
            others = self.others_in(members)
            raise self.detector.failure("connections", others, error) from error
        self._opened.append(group)
        return group

    def _connect(self, members: tuple[int, ...], purpose: str) -> object:
        if self.on_cpu:
            name = hashlib.blake2b(f"{purpose} {members}".encode(), digest_size=8).hexdigest()
            store = PrefixStore(name, self.detector.board.store)
            rank, size = members.index(self.rank), len(members)
            return ProcessGroupGloo(store, rank, size, self.detector.timeout)
        return dist.new_group(
            [dist.get_global_rank(self._base, member) for member in members],
            timeout=self.detector.timeout,
            backend=dist.get_backend(self._base),
            use_local_synchronization=True,
        )

    def others_in(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return these ranks without this one."""
        return tuple(member for member in members if member != self.rank)

    def begin(
        self, work: Callable[[], Work], what: str, peers: tuple[int, ...]
    ) -> Callable[[], None]:
        """Begin a piece of work; return the function that waits for it."""
        try:
            begun = work()
        except RuntimeError as error:
            raise self.detector.failure(what, peers, error) from error
        return partial(self.wait, begun, what, peers)

    def begin_sum(
        self, group: ProcessGroup, members: tuple[int, ...], tensor: Tensor, what: str
    ) -> Callable[[], None]:
        """Begin to all-reduce a tensor; return the function that waits for it."""
        if len(members) == 1:
            return lambda: None
        if members != self.everyone:
            what = f"{what} over {name_ranks(members)}"
        return self.begin(lambda: group.allreduce([tensor]), what, self.others_in(members))

    def wait(self, work: Work, what: str, peers: tuple[int, ...]) -> None:
        """Wait for a piece of work; raise its failure with the cause."""
        self.detector.awaits(what, peers)
        try:
            # On a device, waiting orders streams and must not block the host; there NCCL's own
            # watchdog keeps the time.
            work.wait(self.detector.timeout) if self.on_cpu else work.wait()
        except RuntimeError as error:
            raise self.detector.failure(what, peers, error) from error

    def close(self) -> None:
        """Leave all groups; nothing may be in flight."""
        if not self.on_cpu:
            for group in self._opened:
                dist.destroy_process_group(group)
        self._opened.clear()

    def keep_until_exit(self) -> None:
        """Keep all connections until the process is gone, whatever the interpreter lets go of."""
        for kept in (self.detector.board.store, *self._opened):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
