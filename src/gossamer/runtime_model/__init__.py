"""When decentralization pays: profile a job, predict its iterations, plan.

See docs/runtime_model.md.
"""

from gossamer.runtime_model.methods import Job, build
from gossamer.runtime_model.model import Prediction, Trials, predict, timeline
from gossamer.runtime_model.profile import Profile, read_profile, write_profile

__all__ = [
    "Job",
    "Prediction",
    "Profile",
    "Trials",
    "build",
    "predict",
    "read_profile",
    "timeline",
    "write_profile",
]
