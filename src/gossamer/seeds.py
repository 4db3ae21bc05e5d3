"""Seeds that a simulated and a real run have in common: both draw the same."""

from __future__ import annotations

import hashlib


def worker_seed(seed: int, worker: int, step: int) -> int:
    """Return the seed of what a worker draws in a step's forward pass (dropout masks).

    A real run draws the same with ``torch.manual_seed(worker_seed(seed, rank, step))`` before its
    forward pass.
    """
    digest = hashlib.blake2b(f"{seed}/{worker}/{step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
