"""The catalogue of topologies, and the one place where a name becomes an object."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, get_type_hints

from gossamer import calls
from gossamer.errors import UserError, nearest_in_brackets
from gossamer.topology import graphs, schedules, weights
from gossamer.topology.round import Round
from gossamer.topology.schedules import Schedule, static


class Entry(NamedTuple):
    """One row of the catalogue."""

    build: Callable[..., Round | Schedule]
    """From the number of workers and other arguments; its docstring's first line describes it."""

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
    "local_sgd": Entry(schedules.local_sgd, "every=4"),
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


def as_schedule(topology: str | Round | Schedule, num_workers: int) -> Schedule:
    """Return the schedule that is meant: a text is parsed, a Round comes at every step."""
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
    """Return the schedule that a text such as ``"ada(k0=10, gamma=0.02)"`` names.

    Args:
        text: a name of the catalogue, with its arguments in brackets where it takes any.
        num_workers: how many workers take part.
        defaults: values for arguments that the text leaves open, such as ``steps_per_epoch`` and
            ``workers_per_node``; a topology that does not take one ignores it.

    >>> parse("lattice(k=4)", 16).round(0)
    Round(16 workers, degree 4)
    """
    name, positional, named = read_call(text, "a topology")
    entry = CATALOGUE.get(name)
    if entry is None:
        raise UserError(
            f"unknown topology {name!r}{nearest_in_brackets(name, CATALOGUE)}; "
            f"choose from {', '.join(CATALOGUE)}"
        )
    given = _fill(entry, defaults) | _bind(name, entry, positional, named)
    _check_complete(name, entry, given)
    built = entry.build(num_workers, **_convert(name, entry, given))
    schedule = static(built) if isinstance(built, Round) else built
    return replace(schedule, name=_canonical_text(name, given))


def example(name: str) -> str:
    """Return a text that parses, for any name of the catalogue: ``lattice`` → ``lattice(k=4)``."""
    arguments = CATALOGUE[name].example
    return f"{name}({arguments})" if arguments else name


def read_call(text: str, what: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Split ``name(1, key=value)`` into its name, positional and named arguments.

    Args:
        text: what a user wrote.
        what: what it is to name, for the error.
    """
    try:
        call = calls.read(text)
        named = {key: _literal(value) for key, value in call.named.items()}
        return call.name, [_literal(value) for value in call.positional], named
    except ValueError:
        raise UserError(
            f"{what} is a name or name(argument=value, ...), each argument once, got "
            f"{text[:80]!r}; for instance ring or lattice(k=4)"
        ) from None


def _literal(value: Any) -> Any:
    """Return a value; a bare word is a string, and true and false are booleans."""
    if isinstance(value, calls.Call):
        raise ValueError("an argument that is a call")
    if isinstance(value, calls.Name):
        return {"true": True, "false": False}.get(value, str(value))
    return value


def _fill(entry: Entry, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that this topology takes; refuse those that no topology takes."""
    for key in defaults:
        if not any(key in _parameters(other) for other in CATALOGUE.values()):
            raise UserError(
                f"a default must be an argument of some topology, got {key!r}; "
                "steps_per_epoch and workers_per_node are"
            )
    return {key: value for key, value in defaults.items() if key in _parameters(entry)}


def _parameters(entry: Entry) -> dict[str, inspect.Parameter]:
    """Return what a topology takes besides the number of workers."""
    return dict(list(inspect.signature(entry.build).parameters.items())[1:])


def _bind(name: str, entry: Entry, positional: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name, after a check that the topology takes them."""
    accepted = list(_parameters(entry))
    takes = f"{name} takes {', '.join(accepted) or 'no arguments'}"
    if len(positional) > len(accepted):
        raise UserError(f"{takes}, got {len(positional)} arguments; give fewer, or by name")
    for key in named:
        if key not in accepted:
            remedy = f"use {example(name)}" if accepted else f"write {name} alone"
            hint = nearest_in_brackets(key, accepted)
            raise UserError(f"{takes}, got {key!r}{hint}; {remedy}")
    given = dict(zip(accepted, positional, strict=False))
    if twice := given.keys() & named.keys():
        raise UserError(f"{takes}, got {', '.join(sorted(twice))} twice; give it once, by name")
    return given | named


def _check_complete(name: str, entry: Entry, given: dict[str, Any]) -> None:
    parameters = _parameters(entry).values()
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in given]
    if missing:
        raise UserError(
            f"{name} needs {', '.join(missing)}, got {', '.join(given) or 'no arguments'}; "
            f"for instance {example(name)}"
        )


def _convert(name: str, entry: Entry, given: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(entry.build)
    return {key: _to_type(name, key, value, hints[key]) for key, value in given.items()}


def _to_type(name: str, key: str, value: Any, wanted: Any) -> Any:
    """Return the value as the type its parameter is annotated with; refuse anything lossy."""
    if wanted is weights.WeightRule:
        if isinstance(value, str) and value in _WEIGHT_RULES:
            return _WEIGHT_RULES[value]
        wanted_text = " or ".join(_WEIGHT_RULES)
    elif wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif type(value) is wanted:
        return value
    else:
        wanted_text = {int: "a whole number", float: "a number", bool: "true or false"}[wanted]
    raise UserError(f"{name} needs {wanted_text} for {key}, got {value!r}; see {example(name)}")


def _canonical_text(name: str, given: dict[str, Any]) -> str:
    arguments = ", ".join(f"{key}={value}" for key, value in given.items())
    return f"{name}({arguments})" if arguments else name
