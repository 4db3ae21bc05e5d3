"""The interface of a wire format: how a bucket is encoded, and how messages are mixed.

If a message is not the bucket itself, workers mix the differences from their own message,

    x_i + Σ_j w_ij (Q(x_j) − Q(x_i))

where Q(x_i) is exactly the value that receivers decode for x_i. The rounding error added at one
worker is subtracted at another, so doubly stochastic weights conserve the mean. Rounding is to
nearest, without random numbers, and every operation is elementwise: both engines call the same code
on the same numbers, so they agree bit for bit.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms import Algorithm
from gossamer.topology import Round, Schedule

BLOCK = 1 << 17
"""Numbers processed at a time: a few tensors of this size stay in cache, and the overhead of calls
into torch is small beside the work (`python -m benchmarks.wire`: with a quarter of it 1.6 times as
long)."""

CODED_BUCKET_MB = 4.0
"""Default bucket size of formats that encode: small enough that one bucket is encoded while another
is in flight and a third is decoded."""


class Fate(enum.Enum):
    """The outcome of decoding a message."""

    TAKEN = "taken"
    """Decoded and mixed."""

    MARKED = "marked"
    """A mark: its sender is left out."""

    UNDECODED = "undecoded"
    """Its values are ambiguous or damaged, so it was not mixed."""

    ONE_SIDED = "one-sided"
    """Decoded, but the sender cannot decode the receiver's message. Not mixed at either end: one
    alone would move the mean."""


class Arrival(NamedTuple):
    """What the range of the next message depends on, of a message that arrived."""

    fate: Fate
    seen: float = 0.0
    """The largest difference between the sender's numbers and the receiver's."""

    range: float = 0.0
    """The sender's range. Of an undecoded message, the range that was too narrow."""


class Range(NamedTuple):
    """How far apart workers' numbers are assumed to be."""

    width: float = 0.0
    failures: int = 0
    """Exchanges in a row that widened the range, minus those since that shrank it."""


class Codec(ABC):
    """Encodes and decodes messages of buckets of one dtype. Not thread-safe: it has scratch memory.

    A range is the sender's bound of how far apart workers' numbers are; a codec that needs none
    ignores it. It is zero until numbers differ.
    """

    has_range: ClassVar[bool] = False
    """Whether messages depend on a range."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.work = torch.float64 if dtype == torch.float64 else torch.float32
        """The dtype that differences are summed in."""
        self.device = device

    @abstractmethod
    def new_message(self, numel: int) -> Tensor:
        """Allocate the message of a bucket."""

    @abstractmethod
    def encode(self, x: Tensor, range: float, message: Tensor) -> float:
        """Encode a bucket; return its largest absolute value, if ranges depend on it."""

    @abstractmethod
    def mark(self, message: Tensor) -> None:
        """Encode a mark: the sender is left out."""

    @abstractmethod
    def take(
        self,
        message: Tensor,
        own: Tensor,
        x: Tensor,
        weight: float,
        into: Tensor,
        *,
        first: bool,
        mutual: bool = False,
    ) -> Arrival:
        """Add w (Q(x_j) − Q(x_i)), unless the message is a mark or cannot be decoded.

        Args:
            message: the message of j.
            own: the message of i, which encodes x.
            x: the bucket of i, unchanged since it was encoded.
            weight: the weight that i gives to j.
            into: the sum, in the dtype ``work``.
            first: whether this is the first term, which overwrites the uninitialized memory.
            mutual: whether j receives i's message. Then both mix the other's message, or neither.
        """

    @abstractmethod
    def add_own(self, own: Tensor, factor: float, into: Tensor, *, first: bool) -> None:
        """Add a multiple of Q(x_i), for weights that do not sum to one."""

    def first_range(self, x: Tensor, start: Tensor) -> float:
        """Return the range of a worker that has received nothing yet.

        Args:
            x: its numbers.
            start: the common start of all workers.
        """
        return 0.0

    def next_range(self, range: Range, largest: float, arrivals: Sequence[Arrival]) -> Range:
        """Return the range after an exchange.

        Args:
            range: the range of the worker's own message.
            largest: the largest absolute value in it.
            arrivals: the messages of others.
        """
        return range


class Wire(ABC):
    """A format that buckets are sent in; instances hold settings and no mutable state."""

    name: ClassVar[str]
    """Its name in errors and tables."""

    write_passes: ClassVar[float] = 0.0
    """Cost of encoding a message, in passes of a mean over the bucket (`python -m
    benchmarks.wire`)."""

    read_passes: ClassVar[float] = 0.0
    """Cost of decoding one neighbour's message, besides mixing."""

    bucket_mb: ClassVar[float] = 25.0
    """Default size of a bucket in megabytes."""

    on_cpu_only: ClassVar[bool] = False
    """Whether it needs parameters on the CPU."""

    def __repr__(self) -> str:
        # Ranks compare it, and errors quote it: a format with arguments adds them.
        return self.name

    def check(
        self, algorithm: Algorithm, schedule: Schedule, *, rounds_are_chosen: bool = False
    ) -> None:
        """Raise if the format cannot encode what an algorithm exchanges.

        Args:
            algorithm: the algorithm, which decides what is exchanged.
            schedule: the rounds, without local steps between them.
            rounds_are_chosen: whether a control may choose other rounds, such as an all-reduce.
        """
        return

    def check_round(self, round: Round, where: str) -> None:
        """Raise if a round cannot be run in this format."""
        return

    @abstractmethod
    def num_bytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes of a bucket's message.

        Args:
            numel: number of elements.
            itemsize: bytes of an element in memory.
        """

    @abstractmethod
    def codec(self, dtype: torch.dtype, device: torch.device) -> Codec | None:
        """Return the codec of messages; None if a message is the bucket itself.

        Args:
            dtype: dtype of the buckets.
            device: their device.
        """
