"""Run one specification, simulated or on real ranks, and yield the same records."""

from gossamer.engine.run import ENGINES, run
from gossamer.engine.spec import LR_SCHEDULES, OPTIMIZERS, RunSpec

__all__ = ["ENGINES", "LR_SCHEDULES", "OPTIMIZERS", "RunSpec", "run"]
