"""The connections of one rank to all others, opened and closed together.

A thread that blocks in Gloo aborts the process if it is woken while the interpreter shuts down.
``close`` and ``abandon`` wait for such threads; after ``drop``, ``wait_dropped`` does.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import final

import torch
from torch.distributed import ProcessGroup, Work

from gossamer.gossip.collectives import Collectives
from gossamer.gossip.connections import Connections
from gossamer.gossip.failures import ExchangeError, FailureDetector
from gossamer.gossip.telemetry import Telemetry
from gossamer.gossip.transport import Transport
from gossamer.topology import Round, Schedule

_SHUTDOWN_S = 10.0
"""How long an interpreter may take to shut down."""

_TAG = 1 << 29
"""Of messages that are not part of a round."""

_PART_BYTES = 2**26
"""The most that one message carries, and so one timeout covers."""

_DIGEST_BYTES = 32
_HEADER_BYTES = 8 + _DIGEST_BYTES

MOST_ROUNDS_CONNECTED = 64
"""Of a schedule with a period; more would need too many sockets. The handshake compares as many:
ranks that connect different rounds would wait for each other."""


def rounds_to_connect(schedule: Schedule) -> Iterable[Round]:
    """Return the rounds whose groups get process groups of their own.

    Schedules with a longer period average in groups by point-to-point messages.
    """
    period = schedule.period or 0
    return map(schedule.round, range(period)) if period <= MOST_ROUNDS_CONNECTED else ()


def num_parts(num_bytes: int) -> int:
    """Return in how many messages ``send`` sends bytes, each with the timeout of a message."""
    return 1 + max(-(-num_bytes // _PART_BYTES), 1)  # a header, and at least one part


@final
class Network:
    """The exchanges and collectives of one rank.

    Args:
        process_group: gives rank, size and store; nothing is sent on it.
        detector: explains failures.
        device: of the tensors.
        rounds: rounds whose groups get process groups of their own; see ``Transport``.
        telemetry: counters of the network before this one, if there was one.
        opening: how long ranks may take to connect, if less than the timeout.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        detector: FailureDetector,
        device: torch.device,
        *,
        rounds: Iterable[Round] = (),
        telemetry: Telemetry | None = None,
        opening: timedelta | None = None,
    ) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self.detector = detector
        self._is_dropped = False
        self.telemetry = telemetry or Telemetry()
        self._connections = Connections(process_group, detector, device, opening=opening)
        try:
            self.collectives = Collectives(self._connections, self.telemetry)
            self.transport = Transport(self._connections, self.telemetry, rounds=rounds)
        except ExchangeError:
            # Members that still connect must see at once that this rank does not.
            if opening is not None:
                self._connections.drop()
            raise
        self._connections.allow_computation()

    # - Bytes from one rank to another

    def send(self, data: bytes, receiver: int, each_part: Callable[[], object]) -> None:
        """Send bytes to a rank, which must be in ``receive``; return when all are received.

        Args:
            data: one byte or more.
            receiver: its rank.
            each_part: called after each of ``num_parts`` messages.
        """
        digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
        header = len(data).to_bytes(8, "little") + digest
        starts, view = range(0, len(data), _PART_BYTES), memoryview(data)
        lane = self._open_lane(self.rank, receiver)
        what = f"rank {receiver} to receive its donor's state"
        for part in (header, *(view[start : start + _PART_BYTES] for start in starts)):
            # torch needs writable memory: copy one part at a time, or the donor holds all twice.
            content = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            self._wait(lambda content=content: lane.send([content], 1, _TAG), what, receiver)
            each_part()

    def receive(self, sender: int, each_part: Callable[[], object]) -> bytes:
        """Return the bytes that a rank sends by ``send``.

        Args:
            sender: its rank.
            each_part: called after each of ``num_parts`` messages.

        Raises:
            ExchangeError: they did not arrive, or their digest differs from the sender's.
        """
        lane = self._open_lane(sender, self.rank)
        what = f"the state of rank {sender}"
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self._wait(lambda: lane.recv([header], 0, _TAG), what, sender)
        each_part()
        raw = header.numpy().tobytes()
        content = torch.empty(int.from_bytes(raw[:8], "little"), dtype=torch.uint8)
        for part in content.split(_PART_BYTES):
            self._wait(lambda part=part: lane.recv([part], 0, _TAG), what, sender)
            each_part()
        data = content.numpy().tobytes()
        if hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() != raw[8:]:
            raise self.detector.failure(what, (sender,), RuntimeError("its digest differs"))
        return data

    def _open_lane(self, sender: int, receiver: int) -> ProcessGroup:
        self._connections.open_lanes(frozenset({(sender, receiver)}))
        return self._connections.lane(sender, receiver)

    def _wait(self, work: Callable[[], Work], what: str, peer: int) -> None:
        with self.detector.blocked():
            self._connections.begin(work, what, (peer,))()

    def close(self) -> None:
        """Leave all groups after gathers in flight; no exchange may be in flight."""
        # A thread that waits in Gloo must not be woken after the interpreter has shut down.
        self.collectives.wait_idle(self.detector.timeout.total_seconds())
        self.transport.close()
        self.collectives.close()
        self._connections.close()

    def drop(self) -> None:
        """Close all connections, whatever is in flight, so that peers see them close."""
        if self._is_dropped:
            return
        self._is_dropped = True
        self.transport.close()
        self.collectives.close()
        self._connections.drop()

    def wait_dropped(self, seconds: float) -> bool:
        """Wait until no thread blocks on dropped connections; return False if time runs out."""
        deadline = time.monotonic() + seconds
        idle = [
            waiting.wait_idle(max(deadline - time.monotonic(), 0.0))
            for waiting in (self.transport, self.collectives)
        ]
        return self._connections.wait_dropped(deadline - time.monotonic()) and all(idle)

    def abandon(self, seconds: float) -> None:
        """Give up this network after a failure, so that the process can end or continue without it.

        A thread that waits in Gloo aborts the process if it is woken while the interpreter shuts
        down: by its timeout, by a peer that ends, or by its own group. It therefore gets time to
        wake up first, and all connections stay open until the process has ended.
        """
        left = self.detector.seconds_left
        deadline = time.monotonic() + (left + 1 if left < seconds + _SHUTDOWN_S else seconds)
        for waiting in (self.transport, self.collectives):
            waiting.wait_idle(deadline - time.monotonic())
        self._connections.keep_until_exit()
