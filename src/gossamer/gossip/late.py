"""A worker that comes when others train already: started anew after its end, or for the first time.

Its script is that of all others. ``gossamer launch`` says in a variable that it comes later.
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
"""What workers compare when they begin, and one that comes later must know."""

_PAUSE_S = 0.05


def board_of(
    group: ProcessGroup, timeout: timedelta, *, survives: bool
) -> tuple[NoticeBoard, bool]:
    """Return what ranks tell each other, and whether this one comes later than the others.

    One that was started anew before it had got to decentralize() is on time. So is one that comes
    back where nobody could begin.
    """
    how = os.environ.get(JOINS, "")
    store = group.get_group_store()
    key = f"gossamer/opened/{0 if how == NEW else group.rank()}"
    if not how or (how == RETURNED and not store.add(key, 0)):
        return NoticeBoard(group, timeout), False
    if not survives:
        raise UserError(
            "a worker that is started anew can join the others with on_failure='continue' only, "
            "got 'raise'; start with --restarts 0"
        )
    # What this process opens after this, all open together.
    os.environ.pop(JOINS, None)
    deadline = time.monotonic() + timeout.total_seconds()
    while not _has_begun(store, num_opened := store.add(key, 0)):
        if how == RETURNED and _has_failed(store, num_opened):
            return NoticeBoard(group, timeout), False  # nobody began; all come back and try again
        if time.monotonic() > deadline:
            raise ExchangeError(
                f"worker {group.rank()} comes later than others, and waited for them to begin, at "
                f"most {timeout}, in vain; look for why they did not"
            )
        time.sleep(_PAUSE_S)
    if any(_has_begun(store, serial) for serial in range(1, num_opened)):
        raise UserError(
            "a worker can join a job in which each process opens one gossip, got one that has "
            f"opened {num_opened}; start with --restarts 0, and go on from a checkpoint"
        )
    return NoticeBoard(group, timeout, serial=num_opened), True


def _has_begun(store: Store, serial: int) -> bool:
    """Whether a gossip has members: all compared what they were given, and found it the same."""
    return store.check([f"gossamer/{serial}/members/{CURRENT}"])


def _has_failed(store: Store, serial: int) -> bool:
    """Whether those who were to begin a gossip found that they cannot."""
    key = f"gossamer/{serial}/conclusion"
    return store.check([key]) and bool(json.loads(store.get(key)))


def num_at_start(board: NoticeBoard) -> int:
    """Return how many workers began."""
    return int(json.loads(board.store.get("facts"))[NUM_WORKERS])
