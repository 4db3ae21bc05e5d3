"""How far apart workers are.

``distance`` measures Ξ, exactly and by a sketch; ``dispersion`` what DBench reports of norms.
"""

from gossamer.consensus.dispersion import Dispersion, dispersion, tensor_norms
from gossamer.consensus.distance import (
    Sketch,
    bounds,
    consensus_distance,
    sketch_distance,
    sketch_error,
    tensor_distances,
    theta,
)

__all__ = [
    "Dispersion",
    "Sketch",
    "bounds",
    "consensus_distance",
    "dispersion",
    "sketch_distance",
    "sketch_error",
    "tensor_distances",
    "tensor_norms",
    "theta",
]
