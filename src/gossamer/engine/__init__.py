"""Run one specification, simulated or on real ranks, and yield the same records."""

from gossamer.engine.run import run
from gossamer.engine.spec import CENTRALIZED, LR_SCALINGS, LR_SCHEDULES, OPTIMIZERS, RunSpec

__all__ = ["CENTRALIZED", "LR_SCALINGS", "LR_SCHEDULES", "OPTIMIZERS", "RunSpec", "run"]
