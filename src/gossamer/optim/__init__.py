"""Optimizers for decentralized training: torch optimizers, and DiLoCo's outer optimizer."""

from gossamer.optim.accum_adam import AccumAdam, AccumAdamW, auto_window
from gossamer.optim.diloco import DiLoCo
from gossamer.optim.smooth_adam import SmoothAdam, SmoothAdamW, auto_smoothing
from gossamer.optim.workers import tell_num_workers, with_num_workers

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "DiLoCo",
    "SmoothAdam",
    "SmoothAdamW",
    "auto_smoothing",
    "auto_window",
    "tell_num_workers",
    "with_num_workers",
]
