"""Equal modelled time: how many steps of a run a job would take within so many seconds."""

from __future__ import annotations

from pathlib import Path
from typing import final

from gossamer.engine import CENTRALIZED, RunSpec
from gossamer.errors import ImpossibleError
from gossamer.runtime_model.methods import Job, ddp, gossip
from gossamer.runtime_model.model import after_update, predict, whole_step
from gossamer.runtime_model.profile import read_profile


@final
class ModelledTime:
    """A budget of seconds in the job of a profile; runs that differ in seed share a prediction.

    Args:
        seconds: of modelled time.
        profile: the file of the job whose time is meant.
    """

    def __init__(self, seconds: float, profile: Path) -> None:
        self._seconds = seconds
        self._profile = read_profile(profile)
        self._known: dict[tuple[object, ...], float] = {}

    def steps_of(self, spec: RunSpec) -> int:
        """Return the steps that fit, at least one; what workers train is the profile's."""
        if spec.control != "plain" or spec.gossip_steps > 1:
            raise ImpossibleError(
                "the modelled time of a run must be known before it, got control "
                f"{spec.control!r} and {spec.gossip_steps} gossip steps; use a budget of bytes or "
                "of measured time"
            )
        same = (spec.workers, spec.topology, spec.order, spec.steps_per_epoch, spec.num_steps)
        if same not in self._known:
            self._known[same] = self._iteration_s(spec)
        return max(1, int(self._seconds / self._known[same]))

    def _iteration_s(self, spec: RunSpec) -> float:
        job = Job.of(self._profile, spec.workers)
        if spec.topology == CENTRALIZED:
            method = ddp(job)
        else:
            order = whole_step if spec.order == "awc" else after_update
            method = gossip(job, schedule=spec.schedule, order=order, num_steps=spec.num_steps)
        return predict(method, job.trials()).mean_s
