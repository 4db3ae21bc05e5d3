"""How a worker finds out that it joins a running job: it was restarted, or added later.

Its script is the same as that of all others; ``gossamer launch`` sets the variable ``JOINS``. A
restarted worker joins only if its job had begun: otherwise it starts with the others.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

from torch.distributed import (
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from gossamer.errors import UserError
from gossamer.gossip.epoch_log import CURRENT
from gossamer.gossip.failures import ExchangeError
from gossamer.gossip.notices import NoticeBoard
from gossamer.launched import JOINS, NEW, RETURNED

NUM_WORKERS = "the number of workers"
"""A fact of the handshake that a worker that joins reads."""

_PAUSE_S = 0.05


def board_of(
    group: ProcessGroup, timeout: timedelta, *, survives: bool
) -> tuple[NoticeBoard, bool]:
    """Return the notice board of the gossip, and whether this worker joins a running job.

    It does not if it was restarted before it had called decentralize(), or if the handshake failed
    and all workers start again.
    """
    how = os.environ.get(JOINS, "")
    store = group.get_group_store()
    key = f"gossamer/opened/{0 if how == NEW else group.rank()}"
    if not how or (how == RETURNED and not store.add(key, 0)):
        return NoticeBoard(group, timeout), False
    if not survives:
        raise UserError(
            "a restarted worker can join the others only with on_failure='continue', got 'raise'; "
            "start with --restarts 0"
        )
    # Any later gossip of this process is started by all workers together.
    os.environ.pop(JOINS, None)
    deadline = time.monotonic() + timeout.total_seconds()
    while not _has_begun(store, num_opened := store.add(key, 0)):
        if how == RETURNED and _has_failed(store, num_opened):
            return NoticeBoard(group, timeout), False  # all are restarted, and shake hands again
        if time.monotonic() > deadline:
            raise ExchangeError(
                f"worker {group.rank()} joins a running job, and the others did not begin training "
                f"within {timeout}; check their output"
            )
        time.sleep(_PAUSE_S)
    if any(_has_begun(store, serial) for serial in range(1, num_opened)):
        raise UserError(
            "a worker can join a job in which each process opens one gossip, got one that has "
            f"opened {num_opened}; start with --restarts 0, and resume from a checkpoint"
        )
    return NoticeBoard(group, timeout, serial=num_opened), True


def _has_begun(store: Store, serial: int) -> bool:
    """Return whether a gossip has members: its handshake succeeded."""
    return store.check([f"gossamer/{serial}/members/{CURRENT}"])


def _has_failed(store: Store, serial: int) -> bool:
    """Return whether the handshake of a gossip failed."""
    key = f"gossamer/{serial}/conclusion"
    return store.check([key]) and bool(json.loads(store.get(key)))


def num_at_start(board: NoticeBoard) -> int:
    """Return the number of workers at the start of the job."""
    return int(json.loads(board.store.get("facts"))[NUM_WORKERS])
