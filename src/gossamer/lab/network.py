"""What a lab creates in the kernel: hosts, links and shapers.

Everything is in its own namespaces (one per host, one for the switch), so no interface, address or
route of the machine changes, and removing the namespaces removes all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast, final

from gossamer.errors import UserError
from gossamer.lab import namespaces
from gossamer.lab.iproute import check_machine, configure, run
from gossamer.lab.layout import Host, Layout

INTERFACE = "eth0"
"""The one link of every host, as seen from inside."""

_BURST_S = 3e-3
"""Burst of a link after a pause, as time at its rate; covers a timer that fires late."""

_MIN_BURST_BYTES = 16 * 1024
_HOST_QUEUE_S = 50e-3
"""Queue of a host's end of its link before it drops packets, as time at its rate."""

_MIN_HOST_QUEUE_BYTES = 256 * 1024
_SWITCH_QUEUE_BYTES = 16 * 1024 * 1024
"""Queue of a port of the switch before it drops packets: about the buffer of a top-of-rack switch.
Several hosts send to one port; with a shorter queue they lose packets and wait for TCP timeouts."""

_MAX_SEGMENT_BYTES = 64 * 1024
_ACKNOWLEDGEMENT = "match u8 6 0xff at 9 match u16 52 0xffff at 2 match u8 0x10 0xff at 33"
"""Pure TCP acknowledgements: 20 + 32 bytes of headers, timestamps included, and only the flag ACK.
Those after a loss (SACK) are longer, and queue with the data."""

_TCP = Path("/proc/sys/net/ipv4")
_SETTINGS = {
    # Every kernel has it, so that measurements do not depend on the machine's default.
    "tcp_congestion_control": "reno",
    # Minimum, default and maximum bytes that a connection may have in flight. A round trip takes
    # 0.1 ms here, so half a megabyte fills 10 Gbit/s; with the kernel's default, connections fill
    # the queues of ports that they share, and then wait for timeouts.
    "tcp_wmem": "4096 16384 524288",
    # The switch recognizes acknowledgements by their length, which timestamps are part of.
    "tcp_timestamps": "1",
}
_LINK = re.compile(r"(host|node)\d+")
T = TypeVar("T")


@final
class Network:
    """The namespaces and links of one lab, from `make` to `remove`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.id = namespaces.new_lab()

    def namespace(self, name: str) -> str:
        """Return the namespace of a host, or of the switch."""
        return f"{self.id}.{name}"

    def make(self) -> None:
        """Create everything, after removing the leftovers of dead labs; on failure, clean up."""
        check_machine()
        namespaces.sweep()
        try:
            self._make_switch()
            for host in self._layout.hosts:
                self._make_host(host)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Kill every process in the namespaces, then remove the namespaces."""
        namespaces.remove(self.id)

    def _make_switch(self) -> None:
        switch = self.namespace("switch")
        run("ip", "netns", "add", switch)
        configure("ip", switch, _bridge("core"), needs="bridge")
        for node, bits_s in enumerate(self._layout.uplink_bits_s):
            up, down = f"node{node}", f"up{node}"
            uplink = [
                *_bridge(f"inside{node}"),
                f"link add {up} type veth peer name {down}",
                f"link set {up} master core addrgenmode none up",
                f"link set {down} master inside{node} addrgenmode none up",
            ]
            configure("ip", switch, uplink, needs="veth")
            _shape_port(switch, up, bits_s)
            _shape_port(switch, down, bits_s)

    def _make_host(self, host: Host) -> None:
        switch, namespace = self.namespace("switch"), self.namespace(host.name)
        bridge = f"inside{host.node}" if self._layout.uplink_bits_s else "core"
        run("ip", "netns", "add", namespace)
        self._write_hosts_file(namespaces.FILES / namespace)
        port = [
            f"link add {host.name} type veth peer name {INTERFACE} netns {namespace}",
            f"link set {host.name} master {bridge} addrgenmode none up",
        ]
        inside = [
            "link set lo up",
            f"link set {INTERFACE} addrgenmode none up",
            f"addr add {host.address}/24 dev {INTERFACE}",
        ]
        configure("ip", switch, port, needs="veth")
        configure("ip", namespace, inside)
        self.run_inside(host.name, _set_tcp)
        # A shaper acts on what leaves an interface, so each direction has its own.
        _shape_host(namespace, host.rate_bits_s)
        _shape_port(switch, host.name, host.rate_bits_s)

    def _write_hosts_file(self, folder: Path) -> None:
        # Names for the addresses: without them each connection waits for a name server that cannot
        # be reached. Both forms of an address, because a dual-stack socket reports the second.
        lines = [f"{host.address} {host.name}" for host in self._layout.hosts]
        lines += [f"::ffff:{line}" for line in lines]
        try:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        except OSError as error:
            raise UserError(
                f"a lab must be able to write {folder}, got: {error}; mount /etc writable"
            ) from error

    def run_inside(self, host: str, function: Callable[[], T]) -> T:
        """Call a function inside a host; sockets that it creates stay in its namespace."""
        return namespaces.run_inside(self.namespace(host), function)


def sent_bytes(namespace: str = "") -> int:
    """Return the bytes that a host has sent on its link, frame headers included.

    Args:
        namespace: the host's namespace; by default the one this process runs in.
    """
    # The shaper's counter, because the interface's own counts one header per 64 KB segment.
    where = ["-n", namespace] if namespace else []
    shapers = json.loads(run("tc", *where, "-s", "-j", "qdisc", "show", "dev", INTERFACE))
    return cast("list[dict[str, int]]", shapers)[0]["bytes"]


def set_link(lab: str, name: str, *, up: bool) -> None:
    """Cut a link of a running lab, as if its cable were pulled, or restore it.

    Args:
        lab: the lab's id.
        name: a host (`host0`), or an uplink (`node0`).
        up: True restores it, False cuts it.
    """
    switch = f"{lab}.switch"
    devices = cast("list[dict[str, str]]", json.loads(run("ip", "-n", switch, "-j", "link")))
    links = [device["ifname"] for device in devices if _LINK.fullmatch(device["ifname"])]
    if name not in links:
        raise UserError(f"a link must be one of {', '.join(links)}, got {name!r}")
    configure("ip", switch, [f"link set {name} {'up' if up else 'down'}"])


def _set_tcp() -> None:
    for name, value in _SETTINGS.items():
        (_TCP / name).write_text(value)


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge", f"link set {name} addrgenmode none up"]


def _shape_host(namespace: str, bits_s: int) -> None:
    """Shape what leaves a host."""
    queue = max(_MIN_HOST_QUEUE_BYTES, int(bits_s / 8 * _HOST_QUEUE_S))
    tbf = f"qdisc add dev {INTERFACE} root tbf rate {bits_s} burst {_burst(bits_s)} limit {queue}"
    configure("tc", namespace, [tbf], needs="sch_tbf")
    _bound_segments(namespace, INTERFACE, bits_s)


def _shape_port(switch: str, port: str, bits_s: int) -> None:
    """Shape what leaves a port of the switch, acknowledgements first.

    In one queue they would wait behind the data of the other direction. On paths as short as these,
    two-way traffic then alternates: one direction stalls until the other's queue has drained and
    lets its acknowledgements through (Zhang, Shenker and Clark, SIGCOMM 1991).
    """
    burst = _burst(bits_s)
    whole = f"ceil {bits_s} cburst {burst} quantum {_MAX_SEGMENT_BYTES}"
    # Both classes are guaranteed 1 % and borrow the rest of the link's rate, prio 0 first.
    borrowed = f"rate {max(1, bits_s // 100)} burst {_MIN_BURST_BYTES} {whole}"
    classes = [
        f"qdisc add dev {port} root handle 1: htb default 3",
        f"class add dev {port} parent 1: classid 1:1 htb rate {bits_s} burst {burst} {whole}",
        f"class add dev {port} parent 1:1 classid 1:2 htb {borrowed} prio 0",
        f"class add dev {port} parent 1:1 classid 1:3 htb {borrowed} prio 1",
        f"qdisc add dev {port} parent 1:3 bfifo limit {_SWITCH_QUEUE_BYTES}",
    ]
    configure("tc", switch, classes, needs="sch_htb")
    choice = f"filter add dev {port} parent 1: protocol ip u32 {_ACKNOWLEDGEMENT} flowid 1:2"
    configure("tc", switch, [choice], needs="cls_u32")
    _bound_segments(switch, port, bits_s)


def _burst(bits_s: int) -> int:
    return max(_MIN_BURST_BYTES, int(bits_s / 8 * _BURST_S))


def _bound_segments(namespace: str, device: str, bits_s: int) -> None:
    # A segment larger than the burst would be split into frames in software, which costs CPU time.
    segment = min(_MAX_SEGMENT_BYTES, _burst(bits_s) * 3 // 4)
    configure("ip", namespace, [f"link set {device} gso_max_size {segment}"])
