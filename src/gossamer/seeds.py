"""Seeds that simulated and real runs share, so that both draw the same random numbers."""

from __future__ import annotations

import hashlib


def worker_seed(seed: int, worker: int, step: int) -> int:
    """Return the seed of a worker's random numbers in a step's forward pass (dropout masks).

    A real run draws the same with ``torch.manual_seed(worker_seed(seed, rank, step))`` before its
    forward pass.
    """
    return _digest(f"{seed}/{worker}/{step}")


def pass_seed(seed: int, number: int) -> int:
    """Return the seed of the order of samples in one pass over them.

    >>> pass_seed(0, 1) == pass_seed(1, 0)
    False
    """
    return _digest(f"{seed}/{number}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
