"""Measure the rate between hosts with plain TCP and compare it with the requested one.

The sockets are created inside the hosts and driven by threads of this process, so nothing has to be
installed or started there. A rate is on the wire: payload plus the headers of its frames.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from dataclasses import dataclass
from typing import final

from gossamer.lab.layout import Host, Layout
from gossamer.lab.network import Network
from gossamer.rates import format_rate

TOLERANCE = 0.05
"""Largest relative difference between the requested and the measured rate."""

_PORT = 29400
_CHUNK_BYTES = 256 * 1024
_TIMEOUT_S = 10.0
_WINDOWS = 5
_TRIES = 3
_HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IPv4, and TCP with timestamps."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One direction between two hosts."""

    source: str
    target: str
    asked_bits_s: int
    measured_bits_s: float

    @property
    def error(self) -> float:
        """Relative difference from the requested rate."""
        return self.measured_bits_s / self.asked_bits_s - 1

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance."""
        return abs(self.error) <= TOLERANCE

    def __str__(self) -> str:
        return (
            f"{self.source} to {self.target}: asked {format_rate(self.asked_bits_s)}, "
            f"measured {format_rate(self.measured_bits_s)} ({self.error:+.1%})"
        )


def measure(network: Network, layout: Layout, window_s: float = 0.5) -> list[Measurement]:
    """Measure each host's path to the next one, one after the other.

    Args:
        network: the lab's network, made.
        layout: its layout.
        window_s: how long each path is measured.
    """
    hosts = layout.hosts
    pairs = [(host, hosts[(host.rank + 1) % len(hosts)]) for host in hosts if len(hosts) > 1]
    return [_measure_pair(network, layout, source, target, window_s) for source, target in pairs]


def _measure_pair(
    network: Network, layout: Layout, source: Host, target: Host, window_s: float
) -> Measurement:
    """Measure a path, and retry where it is off: a busy machine can only appear slower."""
    tries: list[Measurement] = []
    while len(tries) < _TRIES and not (tries and tries[-1].holds):
        measured_bits_s = _measure_path(network, source, target, window_s)
        tries.append(
            Measurement(
                source=source.name,
                target=target.name,
                asked_bits_s=layout.path_bits_s(source, target),
                measured_bits_s=measured_bits_s,
            )
        )
    return min(tries, key=lambda each: abs(each.error))


def _measure_path(network: Network, source: Host, target: Host, window_s: float) -> float:
    address = (target.address, _PORT)
    with network.run_inside(target.name, lambda: socket.create_server(address)) as server:
        server.settimeout(_TIMEOUT_S)
        sender = network.run_inside(
            source.name, lambda: socket.create_connection(address, timeout=_TIMEOUT_S)
        )
        receiver, _ = server.accept()
    with sender, receiver:
        receiver.settimeout(_TIMEOUT_S)
        mss = receiver.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        done = threading.Event()
        thread = threading.Thread(target=_send, args=(sender, done), name="lab-verify")
        thread.start()
        try:
            payload_bytes_s = _receive(receiver, window_s)
        finally:
            done.set()
            receiver.shutdown(socket.SHUT_RDWR)
            thread.join(_TIMEOUT_S)
    return payload_bytes_s * 8 * (mss + _HEADER_BYTES) / mss


def _send(connection: socket.socket, done: threading.Event) -> None:
    chunk = bytes(_CHUNK_BYTES)
    while not done.is_set():
        try:
            connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            return


def _receive(connection: socket.socket, window_s: float) -> float:
    """Return payload bytes per second: the median over windows, the first of them left out."""
    # The median, because a pause of this process would count as a slow link in a mean.
    windows = [_receive_window(connection, window_s / _WINDOWS) for _ in range(_WINDOWS + 1)]
    return statistics.median(windows[1:])


def _receive_window(connection: socket.socket, window_s: float) -> float:
    buffer = bytearray(_CHUNK_BYTES)
    connection.recv_into(buffer)
    start = now = time.perf_counter()
    received = 0
    while now - start < window_s:
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the sender closed the connection while its rate was measured")
        received += count
        now = time.perf_counter()
    return received / (now - start)
