"""W virtual workers in one process, equal to the distributed run up to rounding."""

from gossamer.seeds import worker_seed
from gossamer.simulate.centralized import Centralized
from gossamer.simulate.mixing import mix_
from gossamer.simulate.simulation import Simulation

__all__ = ["Centralized", "Simulation", "mix_", "worker_seed"]
