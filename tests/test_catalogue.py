from __future__ import annotations

import contextlib
import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import UserError
from gossamer.topology import CATALOGUE, ada, aer, lattice, parse, star, static
from gossamer.topology.weights import uniform
from tests.catalogue import ALL_TOPOLOGIES, VARIANTS


def test_arguments_by_name_and_by_position() -> None:
    """lattice(4) and lattice(k=4) are the same string."""
    assert parse("lattice(k=4)", 16).round(0) == lattice(16, 4)
    assert parse(" lattice( 4 ) ", 16).round(0) == lattice(16, 4)
    assert parse("star(weights=uniform)", 5).round(0) == star(5, weights=uniform)


@pytest.mark.parametrize("text", ALL_TOPOLOGIES + VARIANTS)
def test_the_name_of_a_schedule_parses_to_itself(text: str) -> None:
    """Reports, records and start-up checks can carry the name instead of the object."""
    num_workers = 16
    schedule = parse(text, num_workers)
    again = parse(schedule.name, num_workers)
    assert again.name == schedule.name
    assert all(again.round(step) == schedule.round(step) for step in range(6))


def test_defaults_fill_what_the_text_leaves_open() -> None:
    """The caller knows steps per epoch and workers per node; the string overrides it."""
    known = {"steps_per_epoch": 7, "workers_per_node": 2}
    assert parse("ada(k0=4, gamma=1)", 16, **known).round(7) == ada(
        16, k0=4, gamma=1, steps_per_epoch=7
    ).round(7)
    assert parse("aer", 16, **known).round(0) == aer(16, workers_per_node=2).round(0)
    assert (
        parse("aer(workers_per_node=4)", 16, **known).period == aer(16, workers_per_node=4).period
    )
    assert parse("ring", 16, **known).name == "ring"


def test_a_default_is_part_of_the_name() -> None:
    """What was filled in is written down, so that the name still says everything."""
    schedule = parse("ada(k0=4, gamma=1)", 16, steps_per_epoch=7)
    assert parse(schedule.name, 16).round(14) == schedule.round(14)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "torrus",
            r"unknown topology 'torrus' \(did you mean 'torus'\?\); choose from ring, torus",
        ),
        ("xyzzy", "unknown topology 'xyzzy'; choose from"),
        ("lattice(kk=4)", r"lattice takes k, weights, got 'kk' \(did you mean 'k'\?\)"),
        ("one_peer_ring(k=2)", "one_peer_ring takes no arguments, got 'k'"),
        ("lattice", r"lattice needs k, got no arguments; for instance lattice\(k=4\)"),
        ("ada(k0=10)", r"ada needs gamma, steps_per_epoch, got k0; for instance ada\("),
        ("lattice(k=four)", "lattice needs an integer for k, got 'four'"),
        ("lattice(k=4.0)", "lattice needs an integer for k, got 4.0"),
        ("lattice(k=true)", "lattice needs an integer for k, got True"),
        ("erdos_renyi(p=half)", "erdos_renyi needs a number for p, got 'half'"),
        ("one_peer_exponential(pairs=1)", "needs true or false for pairs, got 1"),
        (
            "ring(weights=heavy)",
            "ring needs a weight rule for weights, got 'heavy'; choose from uni",
        ),
        ("lattice(4, k=4)", "lattice takes k, weights, got k twice"),
        ("lattice(4, 5, 6)", "got 3 arguments; give fewer"),
        ("lattice(k=4, k=6)", "each argument once"),
        ("ring(weights=[1])", r"weights, got \[1\]; choose from uniform, metropolis"),
        ("ring(" + "-" * 100_000 + "1)", "a topology is a name or name"),
        ("ring(", "a topology is a name or name"),
        ("", "a topology is a name or name"),
        ("ring; import os", "a topology is a name or name"),
        ("__import__('os').getcwd()", "a topology is a name or name"),
        ("lattice(k=1+1)", "a topology is a name or name"),
        ("lattice(**{'k': 4})", "a topology is a name or name"),
        ("ring(weights=uniform(2))", "uniform takes no arguments, got 1 arguments"),
        ("ring(weights=torus())", r"a weight rule for weights, got 'torus'"),
    ],
)
def test_what_cannot_be_read_explains_itself(text: str, words: str) -> None:
    """Errors name the nearest valid name and list what is accepted; nothing is evaluated."""
    with pytest.raises(UserError, match=words):
        parse(text, 16)


LITERALS = st.sampled_from(
    ["0", "1", "2", "3", "-1", "1e9", "0.5", "1e400", "-0.0", "nan", "None", "true", "uniform",
     "'x'", "[1]", "{}", "(1, 2)", "10**9", "1_0"]
)  # fmt: skip


@st.composite
def calls(draw: st.DrawFn) -> str:
    """A name of the catalogue with arguments that it takes, or nearly, and values of any kind."""
    name = draw(st.sampled_from(list(CATALOGUE)))
    taken = [*inspect.signature(CATALOGUE[name].build).parameters][1:]
    keys = draw(st.lists(st.sampled_from([*taken, "q"]), max_size=4))
    return f"{name}({', '.join(f'{key}={draw(LITERALS)}' for key in keys)})"


@settings(max_examples=600)
@given(text=st.one_of(calls(), st.text(alphabet="ringada(k=4,) .[]{}'\"*+-_0", max_size=25)))
def test_any_text_is_a_schedule_or_a_user_error(text: str) -> None:
    """Whatever a user types, the answer is a schedule with rounds, or an explanation."""
    with contextlib.suppress(UserError):
        assert parse(text, 16).round(0).num_workers == 16


def test_a_default_that_no_topology_takes_is_refused() -> None:
    """A misspelt default would otherwise be ignored without a word."""
    with pytest.raises(UserError, match="got 'worker_per_node'"):
        parse("aer", 16, worker_per_node=4)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_has_a_description(name: str) -> None:
    """The first line of the builder's docstring is what the command line says about it."""
    doc = CATALOGUE[name].build.__doc__
    assert doc
    assert doc.splitlines()[0].endswith(".")


def test_a_graph_becomes_a_static_schedule() -> None:
    """A name of a graph stands for the same round at every step."""
    assert parse("lattice(k=4)", 9).period == static(lattice(9, 4)).period == 1
