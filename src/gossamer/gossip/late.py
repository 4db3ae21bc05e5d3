"""A worker that comes when others train already: started anew after its end, or for the first time.

Its script is that of all others. ``gossamer launch`` says in a variable that it comes later.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

from torch.distributed import ProcessGroup

from gossamer.errors import UserError
from gossamer.gossip.failures import ExchangeError
from gossamer.gossip.membership import CURRENT
from gossamer.gossip.notices import NoticeBoard
from gossamer.launched import JOINS, NEW, RETURNED

NUM_WORKERS = "the number of workers"
"""What workers compare when they begin, and one that comes later must know."""

_PAUSE_S = 0.05


def board_of(
    group: ProcessGroup, timeout: timedelta, *, survives: bool
) -> tuple[NoticeBoard, bool]:
    """Return what ranks tell each other, and whether this one comes later than the others.

    One that was started anew before it had got to decentralize() is on time.
    """
    how = os.environ.get(JOINS, "")
    store = group.get_group_store()
    key = f"gossamer/opened/{0 if how == NEW else group.rank()}"
    if not how or (how == RETURNED and not store.add(key, 0)):
        return NoticeBoard(group, timeout), False
    if not survives:
        raise UserError(
            "a worker that is started anew can join the others with on_failure='continue' only, "
            "got 'raise'; start without --restarts"
        )
    # What this process opens after this, all open together.
    del os.environ[JOINS]
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check([f"gossamer/{store.add(key, 0)}/members/{CURRENT}"]):
        if time.monotonic() > deadline:
            raise ExchangeError(
                f"worker {group.rank()} comes later than others, and waited for them to begin, at "
                f"most {timeout}, in vain; look for why they did not"
            )
        time.sleep(_PAUSE_S)
    return NoticeBoard(group, timeout, serial=store.add(key, 0)), True


def num_at_start(board: NoticeBoard) -> int:
    """Return how many workers began."""
    return int(json.loads(board.store.get("facts"))[NUM_WORKERS])
