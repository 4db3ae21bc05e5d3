"""Processes that end with the one that started them, even where that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(how: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux; elsewhere nothing).

    Args:
        how: SIGTERM lets it end its own children first.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how))
    if os.getppid() != parent:  # it ended meanwhile
        signal.raise_signal(how)


if __name__ == "__main__":  # torchrun, on a lifeline
    end_with_parent(signal.SIGTERM)
    from torch.distributed.run import main

    main()
