"""The table of topologies that property tests run over; a new catalogue entry joins by itself."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import strategies as st

from gossamer.errors import UserError
from gossamer.topology import CATALOGUE, Schedule, parse
from gossamer.topology.catalogue import example

ALL_TOPOLOGIES = [example(name) for name in CATALOGUE]

# Arguments other than the examples', where an entry has arguments that change its shape.
VARIANTS = [
    "lattice(k=2)",
    "lattice(k=6)",
    "erdos_renyi(p=0.6, seed=3)",
    "erdos_renyi(p=0.6, seed=4, weights=metropolis)",
    "star(weights=metropolis)",
    "torus(weights=metropolis)",
    "random_regular(k=3, seed=1)",
    "random_regular(k=7, seed=1)",
    "one_peer_exponential(pairs=true)",
    "random_matching(seed=9)",
    "aer(workers_per_node=1)",
    "aer(workers_per_node=2)",
    "base_graph(k=2)",
    "base_graph(k=3)",
    "base_graph(k=4)",
    "od_equidyn(eta=1, seed=5)",
    "ou_equidyn(eta=0.9, seed=5)",
    "ada(k0=6, gamma=1.5, steps_per_epoch=2)",
]

SIZES = (*range(1, 25), 29, 31, 32, 36, 47, 64, 97, 100, 128)


def product(schedule: Schedule, steps: int) -> np.ndarray:
    """Return W_{T−1} … W_0, by its definition."""
    state = np.eye(schedule.num_workers)
    for step in range(steps):
        state = schedule.round(step).matrix().toarray() @ state
    return state


@cache
def sizes_of(text: str) -> st.SearchStrategy[int]:
    """Numbers of workers, odd and prime ones included, that a topology is defined on."""
    sizes = [size for size in SIZES if _is_defined(text, size)]
    assert len(sizes) > 5
    return st.sampled_from(sizes)


def _is_defined(text: str, num_workers: int) -> bool:
    try:
        parse(text, num_workers)
    except UserError:
        return False
    return True
