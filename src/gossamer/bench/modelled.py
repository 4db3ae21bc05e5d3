"""Equal modelled time: how many steps of a run a job would take within so many seconds."""

from __future__ import annotations

from gossamer.engine import CENTRALIZED, RunSpec
from gossamer.errors import ImpossibleError
from gossamer.runtime_model.methods import Job, ddp, gossip
from gossamer.runtime_model.model import after_update, predict, whole_step
from gossamer.runtime_model.profile import Profile


def steps_within(seconds: float, spec: RunSpec, profile: Profile) -> int:
    """Return the steps that fit, at least one.

    Args:
        seconds: of modelled time.
        spec: how workers keep together; what they train is the profile's.
        profile: of the job whose time is meant.
    """
    if spec.control != "plain" or spec.gossip_steps > 1:
        raise ImpossibleError(
            f"the modelled time of a run must be known before it, got control {spec.control!r} and "
            f"{spec.gossip_steps} gossip steps; use a budget of bytes or of measured time"
        )
    job = Job.of(profile, spec.workers)
    if spec.topology == CENTRALIZED:
        method = ddp(job)
    else:
        order = whole_step if spec.order == "awc" else after_update
        method = gossip(job, schedule=spec.schedule, order=order)
    return max(1, int(seconds / predict(method, job.trials()).mean_s))
