"""The catalogue of topologies, and ``parse``, which turns a string into a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from gossamer.errors import UserError
from gossamer.registry import Registry
from gossamer.topology import graphs, schedules, weights
from gossamer.topology.round import Round
from gossamer.topology.schedules import Schedule, static


class Entry(NamedTuple):
    """One row of the catalogue."""

    build: Callable[..., Round | Schedule]
    """Takes the number of workers and other arguments; its docstring's first line describes it."""

    example: str = ""
    """Arguments that tables, pictures and tests use."""


# A new topology is one function and one row here: parsing, the tables of the command line and the
# property tests read this table.
CATALOGUE: dict[str, Entry] = {
    "ring": Entry(graphs.ring),
    "torus": Entry(graphs.torus),
    "lattice": Entry(graphs.lattice, "k=4"),
    "exponential": Entry(graphs.exponential),
    "hypercube": Entry(graphs.hypercube),
    "complete": Entry(graphs.complete),
    "star": Entry(graphs.star),
    "erdos_renyi": Entry(graphs.erdos_renyi, "p=0.3"),
    "random_regular": Entry(graphs.random_regular, "k=4"),
    "one_peer_ring": Entry(schedules.one_peer_ring),
    "one_peer_exponential": Entry(schedules.one_peer_exponential),
    "one_peer_hypercube": Entry(schedules.one_peer_hypercube),
    "random_matching": Entry(schedules.random_matching),
    "aer": Entry(schedules.aer, "workers_per_node=4"),
    "base_graph": Entry(schedules.base_graph, "k=1"),
    "od_equidyn": Entry(schedules.od_equidyn),
    "ou_equidyn": Entry(schedules.ou_equidyn),
    "ada": Entry(schedules.ada, "k0=10, gamma=0.02, steps_per_epoch=100"),
}

_WEIGHT_RULES: dict[str, weights.WeightRule] = {
    "uniform": weights.uniform,
    "metropolis": weights.metropolis,
}


def example(name: str) -> str:
    """Return a string that parses, for any name of the catalogue: ``lattice`` → ``lattice(k=4)``.

    Another name is its own example.
    """
    arguments = CATALOGUE[name].example if name in CATALOGUE else ""
    return f"{name}({arguments})" if arguments else name


TOPOLOGY_REGISTRY: Registry[Round | Schedule] = Registry(
    kind="topology",
    table=CATALOGUE,
    group="gossamer.topologies",
    example="ring or lattice(k=4)",
    makes=(Round, Schedule),
    given=1,
    build_of=attrgetter("build"),
    example_of=example,
    instead={"local_sgd": "use 'complete' with algorithm='atc' and every=8, which is local SGD"},
)
"""Functions of the number of workers, and of arguments of their own."""

WEIGHT_RULE_REGISTRY: Registry[Round] = Registry(
    kind="weight rule",
    table=_WEIGHT_RULES,
    group="gossamer.weight_rules",
    example="uniform",
    makes=(Round,),
    given=1,
    stands_for=(weights.WeightRule,),
)
"""Functions of an adjacency matrix."""


def as_schedule(topology: str | Round | Schedule, num_workers: int) -> Schedule:
    """Return the topology as a schedule: a string is parsed, a Round is used at every step."""
    if isinstance(topology, str):
        return parse(topology, num_workers)
    schedule = static(topology) if isinstance(topology, Round) else topology
    if schedule.num_workers != num_workers:
        raise UserError(
            f"the topology must be on {num_workers} workers, got one on {schedule.num_workers}; "
            f"build it for {num_workers}"
        )
    return schedule


def parse(text: str, num_workers: int, **defaults: Any) -> Schedule:
    """Return the schedule that a string such as ``"ada(k0=10, gamma=0.02)"`` names.

    Args:
        text: a name of the catalogue or a plug-in, with its arguments in brackets where it takes
            any.
        num_workers: how many workers take part.
        defaults: values for arguments that the string leaves open, such as ``steps_per_epoch`` and
            ``workers_per_node``; a topology that does not take one ignores it.

    >>> parse("lattice(k=4)", 16).round(0)
    Round(16 workers, degree 4)
    """
    _check_taken_by_some(defaults)
    part = TOPOLOGY_REGISTRY.parse(text, defaults)
    return replace(as_schedule(part.make(num_workers), num_workers), name=part.name)


def _check_taken_by_some(defaults: Iterable[str]) -> None:
    """Raise on a default that no topology of the catalogue takes: it must be a misspelling."""
    for key in defaults:
        if not any(key in inspect.signature(row.build).parameters for row in CATALOGUE.values()):
            raise UserError(
                f"a default must be an argument of some topology, got {key!r}; "
                "steps_per_epoch and workers_per_node are"
            )
