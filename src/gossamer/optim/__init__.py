"""Optimizers for decentralized training; ordinary torch optimizers."""

from gossamer.optim.accum_adam import AccumAdam, AccumAdamW

__all__ = ["AccumAdam", "AccumAdamW"]
