"""All that connects one rank to the others, opened and ended together."""

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
"""Of messages that are no part of a round."""

_PART_BYTES = 2**26
"""The most that one wait, and so one timeout, is for."""

_DIGEST_BYTES = 32

MOST_ROUNDS_CONNECTED = 64
"""Of a schedule with a period: more would cost too many sockets. All ranks compare as many, for
ranks with different ones would wait for each other."""


def rounds_to_connect(schedule: Schedule) -> Iterable[Round]:
    """Return the rounds whose groups are worth a process group each.

    Schedules with a longer period average in groups by messages.
    """
    period = schedule.period or 0
    return map(schedule.round, range(period)) if period <= MOST_ROUNDS_CONNECTED else ()


def num_parts(num_bytes: int) -> int:
    """Return in how many parts bytes are sent, each of which may take as long as a message."""
    return 1 + max(-(-num_bytes // _PART_BYTES), 1)  # the header, and one even of nothing


def _header(num_bytes: int, digest: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(num_bytes.to_bytes(8, "little") + digest), dtype=torch.uint8)


@final
class Network:
    """The exchanges and collectives of one rank.

    Args:
        process_group: the ranks that take part; nothing is sent on it.
        detector: who explains what fails.
        device: where the tensors live.
        rounds: rounds whose groups get process groups of their own; see ``Transport``.
        telemetry: what to count in, where there was a network before this one.
        opening: how long ranks may take to connect, where that is less than the timeout.
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
            if opening is not None:  # others are to see at once that this rank does not wait on
                self._connections.drop()
            raise
        self._connections.allow_computation()

    # - Bytes from one rank to another

    def send(self, data: bytes, receiver: int, each_part: Callable[[], object]) -> None:
        """Send bytes to a rank, which must be in ``receive``; returns when it has taken them.

        Args:
            data: any number of them.
            receiver: its rank.
            each_part: called when one of ``num_parts`` is sent.
        """
        digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
        header = _header(len(data), digest)
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        lane = self._open_lane(self.rank, receiver)
        for part in (header, *content.split(_PART_BYTES)):
            what = f"rank {receiver} to take what it is sent"
            self._wait(lambda part=part: lane.send([part], 1, _TAG), what, receiver)
            each_part()

    def receive(self, sender: int, each_part: Callable[[], object]) -> bytes:
        """Return the bytes that a rank sends by ``send``.

        Args:
            sender: its rank.
            each_part: called when one of ``num_parts`` has come.

        Raises:
            ExchangeError: they did not come, or are not what was sent.
        """
        lane = self._open_lane(sender, self.rank)
        what = f"what rank {sender} sends"
        header = torch.empty_like(_header(0, bytes(_DIGEST_BYTES)))
        self._wait(lambda: lane.recv([header], 0, _TAG), what, sender)
        each_part()
        raw = header.numpy().tobytes()
        content = torch.empty(int.from_bytes(raw[:8], "little"), dtype=torch.uint8)
        for part in content.split(_PART_BYTES):
            self._wait(lambda part=part: lane.recv([part], 0, _TAG), what, sender)
            each_part()
        data = content.numpy().tobytes()
        if hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() != raw[8:]:
            raise self.detector.failure(what, (sender,), RuntimeError("its digest is another"))
        return data

    def _open_lane(self, sender: int, receiver: int) -> ProcessGroup:
        self._connections.open_lanes(frozenset({(sender, receiver)}))
        return self._connections.lane(sender, receiver)

    def _wait(self, work: Callable[[], Work], what: str, peer: int) -> None:
        with self.detector.blocked():
            self._connections.begin(work, what, (peer,))()

    def close(self) -> None:
        """Leave all groups, when gathers in flight have ended; no exchange may be."""
        # A thread of ours that waits in Gloo must not be woken when the interpreter is gone.
        self.collectives.wait_idle(self.detector.timeout.total_seconds())
        self.transport.close()
        self.collectives.close()
        self._connections.close()

    def drop(self) -> None:
        """Let go of everything, whatever is in flight, so that peers see connections close."""
        if self._is_dropped:
            return
        self._is_dropped = True
        self.transport.close()
        self.collectives.close()
        self._connections.drop()

    def wait_dropped(self, seconds: float) -> bool:
        """Return whether nothing waits on what was dropped any more, within a time."""
        deadline = time.monotonic() + seconds
        idle = [
            waiting.wait_idle(max(deadline - time.monotonic(), 0.0))
            for waiting in (self.transport, self.collectives)
        ]
        return self._connections.wait_dropped(deadline - time.monotonic()) and all(idle)

    def abandon(self, seconds: float) -> None:
        """Let the process end, or go on without this network, though peers have failed it.

        A thread that waits in Gloo would abort the process if it were woken while the interpreter
        shuts down: by its timeout, a peer's end, or that of its own group. So it gets time to be
        woken before, and all connections stay until the process is gone.
        """
        left = self.detector.seconds_left
        deadline = time.monotonic() + (left + 1 if left < seconds + _SHUTDOWN_S else seconds)
        for waiting in (self.transport, self.collectives):
            waiting.wait_idle(deadline - time.monotonic())
        self._connections.keep_until_exit()
