"""Algorithms: what a step does with rounds. One file and one table row each, for both engines."""

from gossamer.algorithms.algorithm import (
    PARAMETERS,
    Algorithm,
    StepContext,
    mix,
    name_of_numbers,
    rates_of,
    states_of,
    unfinished,
)
from gossamer.algorithms.catalogue import (
    ALGORITHM_REGISTRY,
    ALGORITHMS,
    name_of,
    parse_algorithm,
)

__all__ = [
    "ALGORITHMS",
    "ALGORITHM_REGISTRY",
    "PARAMETERS",
    "Algorithm",
    "StepContext",
    "mix",
    "name_of",
    "name_of_numbers",
    "parse_algorithm",
    "rates_of",
    "states_of",
    "unfinished",
]
