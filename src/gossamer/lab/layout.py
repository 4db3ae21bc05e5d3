"""The hosts of a lab and the rates of their links: an immutable value, parsed from a string.

Pure: nothing here touches the kernel. Rates are bits per second on the wire, frame headers
included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

from gossamer.errors import UserError, quoted
from gossamer.rates import parse_rate

MAX_HOSTS = 250
"""One host per address of a /24."""

_LAYOUT = re.compile(r"([0-9]{1,9})x([0-9]{1,9}):([^/]+)/([^/]+)")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One worker's host: a network namespace with one link."""

    rank: int
    """Index among all hosts, and the rank of the worker that runs on it."""

    node: int
    """The node it belongs to; without a layout of nodes every host is its own."""

    local_rank: int
    """Index within its node."""

    rate_bits_s: int
    """Rate of its link, in each direction."""

    @property
    def name(self) -> str:
        """Prefix of its output, and the name that `cut` and `restore` take."""
        return f"host{self.rank}"

    @property
    def address(self) -> str:
        """Its address, which exists only inside the lab's namespaces."""
        return f"10.77.0.{self.rank + 1}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Hosts, and the uplinks between their nodes."""

    hosts: tuple[Host, ...]
    """All hosts in rank order, the same number on every node."""

    uplink_bits_s: tuple[int, ...] = ()
    """Rate of each node's uplink, shared by its hosts; empty: all hosts on one switch."""

    def __post_init__(self) -> None:
        _check_size(len(self.hosts))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.hosts[-1].node + 1

    @property
    def hosts_per_node(self) -> int:
        """Number of hosts on each node."""
        return len(self.hosts) // self.num_nodes

    def path_bits_s(self, source: Host, target: Host) -> int:
        """Return the rate of the slowest link between two hosts."""
        rates = [source.rate_bits_s, target.rate_bits_s]
        if self.uplink_bits_s and source.node != target.node:
            rates += [self.uplink_bits_s[source.node], self.uplink_bits_s[target.node]]
        return min(rates)


def one_switch(num_hosts: int, rates: str) -> Layout:
    """Return hosts that are each a node of their own, on one switch.

    Args:
        num_hosts: how many hosts.
        rates: one rate for all of them, or one per host, separated by commas.

    >>> [host.rate_bits_s for host in one_switch(2, "300mbit,1gbit").hosts]
    [300000000, 1000000000]
    """
    _check_size(num_hosts)  # before a list of them is built, which may not fit in memory
    given = rates.split(",")
    if len(given) not in (1, num_hosts):
        raise UserError(
            f"--rate must be one rate or one per host ({num_hosts}), got {len(given)}; "
            "write for example --rate 300mbit"
        )
    bits_s = [parse_rate(rate) for rate in given] * (num_hosts // len(given))
    return Layout(
        hosts=tuple(
            Host(rank=rank, node=rank, local_rank=0, rate_bits_s=rate)
            for rank, rate in enumerate(bits_s)
        )
    )


def parse_layout(text: str) -> Layout:
    """Return a layout of nodes with several workers each: fast inside, slow between.

    Args:
        text: `NODESxWORKERS:INSIDE/BETWEEN`, the rate of each worker's link to its node's
            switch and that of each node's uplink, which its workers share.

    >>> layout = parse_layout("2x4:10gbit/1gbit")
    >>> len(layout.hosts), layout.num_nodes, layout.uplink_bits_s
    (8, 2, (1000000000, 1000000000))
    """
    match = _LAYOUT.fullmatch(text.strip())
    if match is None or int(match[1]) == 0 or int(match[2]) == 0:
        raise UserError(
            f"a layout must read NODESxWORKERS:INSIDE/BETWEEN, got {quoted(text)}; "
            "write for example 2x4:10gbit/1gbit"
        )
    num_nodes, per_node = int(match[1]), int(match[2])
    _check_size(num_nodes * per_node)
    inside, between = parse_rate(match[3]), parse_rate(match[4])
    return Layout(
        hosts=tuple(
            Host(rank=rank, node=rank // per_node, local_rank=rank % per_node, rate_bits_s=inside)
            for rank in range(num_nodes * per_node)
        ),
        uplink_bits_s=(between,) * num_nodes,
    )


def _check_size(num_hosts: int) -> None:
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise UserError(
            f"a lab must have 1 to {MAX_HOSTS} hosts, got {quoted(num_hosts)}; "
            "change --hosts or --layout"
        )
