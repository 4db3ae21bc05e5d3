"""Consensus distance, and its control. Pure: both engines use the same objects.

Measuring: ``distance`` is Ξ, exactly and by a sketch; ``dispersion`` is what DBench reports of
norms; ``critical`` says how far apart workers may be at no cost; ``outliers`` finds diverged ones.

Controlling, each module on top of those before it:

    observation    what all workers know when a decision is made
    memories       what targets remember between steps
    targets        how far apart workers may be: what is wanted
    controller     (observation, state) → (decision, state), and a policy's ``bind``
    policies       which rounds to choose: what is done about it
    catalogue      names of targets and policies; where a string becomes one
    round_source   what gives an engine its rounds, from a schedule or from a controller
"""

from gossamer.consensus.catalogue import bind, parse_control
from gossamer.consensus.controller import Controller, Decision, Policy
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
from gossamer.consensus.memories import Memory
from gossamer.consensus.norm_steps import NormSteps
from gossamer.consensus.observation import Needs, Observation
from gossamer.consensus.outliers import OutlierWatch
from gossamer.consensus.policies import AdaConsensus, Gamma, LocalSteps, Repeat
from gossamer.consensus.round_source import (
    Gathered,
    RoundSource,
    chooses_rounds,
    make_round_source,
    name_of,
)
from gossamer.consensus.targets import (
    Adaptive,
    Constant,
    CriticalTarget,
    Exact,
    Phases,
    Plain,
    Target,
)

# Former names, kept for scripts that use them.
Control = Policy
Plan = RoundSource
planner = make_round_source

__all__ = [
    "AdaConsensus",
    "Adaptive",
    "Constant",
    "Control",
    "Controller",
    "CriticalState",
    "CriticalTarget",
    "Decision",
    "Exact",
    "Gamma",
    "Gathered",
    "LocalSteps",
    "Memory",
    "Needs",
    "NormSteps",
    "Observation",
    "OutlierWatch",
    "Phases",
    "Plain",
    "Plan",
    "Policy",
    "Repeat",
    "RoundSource",
    "Sketch",
    "Target",
    "bind",
    "bounds",
    "check_interval",
    "chooses_rounds",
    "consensus_distance",
    "critical_distance",
    "dispersion",
    "make_round_source",
    "name_of",
    "parse_control",
    "planner",
    "sketch_distance",
    "sketch_error",
    "tensor_norms",
    "theta",
]
