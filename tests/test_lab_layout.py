from __future__ import annotations

import doctest

import pytest

from gossamer import rates
from gossamer.errors import UserError
from gossamer.lab import layout
from gossamer.lab.layout import one_switch, parse_layout
from gossamer.rates import parse_rate


def test_examples_in_the_documentation() -> None:
    """The examples in the docstrings of layouts and rates give what they say."""
    assert doctest.testmod(layout).failed == doctest.testmod(rates).failed == 0


def test_hosts_on_one_switch_are_nodes_of_their_own() -> None:
    """Without a layout of nodes every host is a node with one worker and its own rate."""
    hosts = one_switch(3, "10mbit,20mbit,30mbit").hosts
    assert [(host.node, host.local_rank) for host in hosts] == [(0, 0), (1, 0), (2, 0)]
    assert [host.rate_bits_s for host in hosts] == [10**7, 2 * 10**7, 3 * 10**7]


def test_the_slowest_link_of_a_path_is_its_rate() -> None:
    """Inside a node a path has the inner rate, between nodes that of the uplinks."""
    layout = parse_layout("2x2:1gbit/100mbit")
    first, second, third, _ = layout.hosts
    assert layout.path_bits_s(first, second) == 10**9
    assert layout.path_bits_s(second, third) == 10**8


def test_ranks_count_through_the_nodes() -> None:
    """Ranks are numbered node by node, as torchrun numbers them."""
    hosts = parse_layout("2x3:1gbit/100mbit").hosts
    assert [host.rank for host in hosts] == list(range(6))
    assert [host.node for host in hosts] == [0, 0, 0, 1, 1, 1]
    assert [host.local_rank for host in hosts] == [0, 1, 2, 0, 1, 2]
    assert len({host.address for host in hosts}) == 6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "300",
        "mbit",
        "-3mbit",
        "0mbit",
        "3 mb",
        "3mbit/s",
        "nan",
        "9" * 400 + "gbit",
        "99999gbit",
        "٣mbit",
    ],
)
def test_a_rate_that_is_none_is_refused(text: str) -> None:
    """What is not a positive number and a unit is an error that shows how to write one."""
    with pytest.raises(UserError, match="300mbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    "text", ["", "2x4", "2x4:1gbit", "0x4:1gbit/1gbit", "2x:1gbit/1gbit", "2x4:1gbit/1gbit/1gbit"]
)
def test_a_layout_that_is_none_is_refused(text: str) -> None:
    """What does not read NODESxWORKERS:INSIDE/BETWEEN is an error that shows how it reads."""
    with pytest.raises(UserError, match="2x4:10gbit/1gbit"):
        parse_layout(text)


@pytest.mark.parametrize("num_hosts", [0, 251, 10**11])
def test_a_lab_has_a_bounded_number_of_hosts(num_hosts: int) -> None:
    """No hosts at all, and more than there are addresses, are refused."""
    with pytest.raises(UserError, match="1 to 250 hosts"):
        one_switch(num_hosts, "1gbit")
    with pytest.raises(UserError, match="1 to 250 hosts"):
        parse_layout("100000x100000:1gbit/1gbit")


def test_rates_must_match_the_hosts() -> None:
    """A list of rates has one for each host."""
    with pytest.raises(UserError, match=r"one per host \(3\), got 2"):
        one_switch(3, "1gbit,2gbit")
