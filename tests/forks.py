"""Ranks that end as scripts do, forked from a script that has imported torch once for all."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn


def run_forked(folder: Path, bodies: dict[str, Callable[[], None]]) -> None:
    """Run each function in a process of its own, and wait for all.

    What one writes to stderr is then in ``folder / f"{name}.err"``, its exit code in
    ``folder / f"{name}.code"``.
    """
    torch.set_num_threads(1)
    torch.optim.SGD(nn.Linear(1, 1).parameters())  # imports much, and only once before the forks
    gc.freeze()  # or each of them would look for garbage in all of it when it ends
    pids = {_fork(body, folder / f"{name}.err"): name for name, body in bodies.items()}
    for pid, name in pids.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (folder / f"{name}.code").write_text(str(code))


def _fork(body: Callable[[], None], stderr: Path) -> int:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
        body()
        sys.exit()
    return pid
