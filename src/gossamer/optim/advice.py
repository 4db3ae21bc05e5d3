"""What to know about an optimizer before it trains on each worker's own small batch."""

from __future__ import annotations

from torch.optim import Adam, Optimizer

from gossamer.optim.accum_adam import AccumAdam, AccumAdamW

_FEWEST_WORKERS = 4
"""That Adam's loss was measured for."""

_PLAIN = (
    "%s on each worker's own small batch learns less per step than on averaged gradients; "
    "gossamer.optim.SmoothAdam%s.like(optimizer) makes up for most of that (docs/adam.md)"
)
_OVERLAPPED = (
    "%s learns less per step where the exchange is overlapped, most at high learning rates: use "
    "gossamer.optim.SmoothAdam%s, or algorithm='atc' (docs/adam.md)"
)


def advice_on(optimizer: Optimizer, num_workers: int, *, overlaps: bool) -> str:
    """Return what an optimizer loses against averaged gradients, and what to do; or nothing.

    Args:
        optimizer: any, which has been told the number of workers.
        num_workers: the workers that mix.
        overlaps: whether gradients are taken at parameters that are not mixed yet.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, AccumAdam | AccumAdamW):
        windows = any(group["window"] > 1 for group in optimizer.param_groups)
        return _OVERLAPPED % (name, "W" * optimizer.decoupled) if windows and overlaps else ""
    if isinstance(optimizer, Adam) and num_workers >= _FEWEST_WORKERS:
        return _PLAIN % (name, "W" * bool(optimizer.defaults.get("decoupled_weight_decay")))
    return ""
