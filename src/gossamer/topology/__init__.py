"""Who exchanges with whom, at which step, and with which weight.

Pure: numpy and scipy, no process group. A graph is a function that returns a Round; a schedule
gives the Round of every step; ``parse`` turns a string into a schedule.
"""

from gossamer.topology.catalogue import CATALOGUE, as_schedule, parse
from gossamer.topology.graphs import (
    complete,
    erdos_renyi,
    exponential,
    from_matrix,
    from_networkx,
    hypercube,
    lattice,
    random_regular,
    ring,
    star,
    torus,
)
from gossamer.topology.round import Round
from gossamer.topology.schedules import (
    Schedule,
    ada,
    aer,
    aer_on_nodes,
    base_graph,
    cycle,
    in_turns,
    od_equidyn,
    one_peer_exponential,
    one_peer_hypercube,
    one_peer_ring,
    ou_equidyn,
    random_matching,
    spaced,
    static,
)
from gossamer.topology.weights import damped, metropolis, nobody, pushed, uniform

__all__ = [
    "CATALOGUE",
    "Round",
    "Schedule",
    "ada",
    "aer",
    "aer_on_nodes",
    "as_schedule",
    "base_graph",
    "complete",
    "cycle",
    "damped",
    "erdos_renyi",
    "exponential",
    "from_matrix",
    "from_networkx",
    "hypercube",
    "in_turns",
    "lattice",
    "metropolis",
    "nobody",
    "od_equidyn",
    "one_peer_exponential",
    "one_peer_hypercube",
    "one_peer_ring",
    "ou_equidyn",
    "parse",
    "pushed",
    "random_matching",
    "random_regular",
    "ring",
    "spaced",
    "star",
    "static",
    "torus",
    "uniform",
]
