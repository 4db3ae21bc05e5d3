"""Run one specification, simulated or on real ranks, and yield the same records."""

from gossamer.engine.checkpoints import Checkpointing
from gossamer.engine.parts import LR_SCALINGS, LR_SCHEDULES, OPTIMIZERS
from gossamer.engine.run import run
from gossamer.engine.spec import CENTRALIZED, RunSpec

__all__ = [
    "CENTRALIZED",
    "LR_SCALINGS",
    "LR_SCHEDULES",
    "OPTIMIZERS",
    "Checkpointing",
    "RunSpec",
    "run",
]
