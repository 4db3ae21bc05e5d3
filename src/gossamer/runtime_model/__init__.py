"""When decentralization pays: profile a job, predict its iterations, plan.

See docs/runtime_model.md.
"""

from gossamer.runtime_model.methods import Job, build
from gossamer.runtime_model.model import Prediction, predict, timeline
from gossamer.runtime_model.plan import Plan, make_plan
from gossamer.runtime_model.profile import Profile, read_profile, write_profile

__all__ = [
    "Job",
    "Plan",
    "Prediction",
    "Profile",
    "build",
    "make_plan",
    "predict",
    "read_profile",
    "timeline",
    "write_profile",
]
