"""Optimizers for decentralized training; ordinary torch optimizers, and an outer one."""

from gossamer.optim.accum_adam import AccumAdam, AccumAdamW
from gossamer.optim.diloco import DiLoCo

__all__ = ["AccumAdam", "AccumAdamW", "DiLoCo"]
