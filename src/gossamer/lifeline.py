"""End a process together with its parent, even if the parent is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(how: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent ends (only on Linux).

    Args:
        how: the signal; SIGTERM gives it time to end its own children.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how))
    if os.getppid() != parent:  # it ended before prctl()
        signal.raise_signal(how)


if __name__ == "__main__":  # torchrun, ended with its parent
    end_with_parent(signal.SIGTERM)
    from torch.distributed.run import main

    main()
