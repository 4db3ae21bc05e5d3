"""How far apart workers are, and what to do about it.

``distance`` measures Ξ, exactly and by a sketch; ``dispersion`` is what DBench reports of norms;
``critical`` says how far apart workers may be; ``control`` decides how they mix. Pure: both engines
feed the same objects.
"""

from gossamer.consensus.actions import AdaConsensus, Gamma, Repeat
from gossamer.consensus.control import Control, Decision
from gossamer.consensus.controls import bind, parse_control
from gossamer.consensus.critical import CriticalState, critical_distance
from gossamer.consensus.dispersion import check_interval, dispersion, tensor_norms
from gossamer.consensus.distance import (
    Sketch,
    bounds,
    consensus_distance,
    sketch_distance,
    sketch_error,
    theta,
)
from gossamer.consensus.steering import Gathered, Plan, name_of, planner
from gossamer.consensus.targets import (
    Adaptive,
    Constant,
    CriticalTarget,
    Exact,
    Observation,
    Phases,
    Plain,
    Target,
)

__all__ = [
    "AdaConsensus",
    "Adaptive",
    "Constant",
    "Control",
    "CriticalState",
    "CriticalTarget",
    "Decision",
    "Exact",
    "Gamma",
    "Gathered",
    "Observation",
    "Phases",
    "Plain",
    "Plan",
    "Repeat",
    "Sketch",
    "Target",
    "bind",
    "bounds",
    "check_interval",
    "consensus_distance",
    "critical_distance",
    "dispersion",
    "name_of",
    "parse_control",
    "planner",
    "sketch_distance",
    "sketch_error",
    "tensor_norms",
    "theta",
]
