"""Eight or four bits per number: its place on a lattice, modulo 2^b.

    k_j = round(x_j / s_j)                                    s_j, the step of j's lattice
    q_j = k_j mod 2^b                                         the message, with s_j
    k_j = r + ((q_j − r + 2^(b−1)) mod 2^b) − 2^(b−1)         at i, with r = round(x_i / s_j)
    x_i + Σ_j w_ij (s_j k_j − s_i k_i)

Neighbours are much closer to each other than to zero, so the low bits of a place identify it: b
bits have to resolve the *range* of differences between workers, not of values. No state is kept per
neighbour, which suits rounds that change. Reference: Lu and De Sa, Moniqua
(https://arxiv.org/abs/2002.11787), here with nearest rounding.

- The range follows the largest difference of recent exchanges. Messages contain the sender's range,
  and a worker adopts a larger one from a neighbour, so ranges are nearly equal on all workers, also
  on directed graphs. Before its first exchange a worker only knows its own distance from the common
  start; another may be as far in the opposite direction, hence twice that distance.
- A step is a power of two, so arithmetic on places is exact in any order.
- If a difference is outside of the range, a number decodes to a wrong place. The header has a
  checksum of all places, which detects this: the message is not mixed, and the range is widened, by
  more after each failure in a row. A worker widens its range to at most twice its largest absolute
  value by itself, as no two numbers are farther apart than twice the larger one, and larger ranges
  arrive from neighbours.

Note [Places in the bits of a float]
Near C = 1.5 · 2^23 s float32 numbers are s apart (float64: 2^52). So x + C is x rounded to the
lattice, half to even, and its bits, read as an integer, are those of C plus k. The low bits of that
integer are the message, an offset of places may be added to it, and subtracting C gives the decoded
number. That holds for |x| < 2^22 s. The encoder keeps x within half of that by its choice of step;
at a receiver whose own number is beyond it, the checksum does not match.

Note [Both or none]
If i and j send to each other, the mean is conserved if both mix the other's message, or neither
does. Ranges are each sender's own, so one may be wide enough and the other not. But a worker that
has decoded a message knows d = s_j k_j − s_i k_i, and so does the other end if it has decoded; a
small enough d implies that it has. If steps are equal, d is a number of places, the same at both
ends. Otherwise let f be the finer and c the coarser step: all places of the coarse lattice are
places of the fine one, and the coarse sender's number is at most c/2 from its place, that is c/2f
fine places. Up to 2^(b−1) − 1 fine places can be decoded, so both mix if
|d| ≤ (2^(b−1) − 1) f − c/2.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from gossamer.algorithms import Algorithm
from gossamer.errors import UserError
from gossamer.topology import Round, Schedule
from gossamer.wire.wire import BLOCK, CODED_BUCKET_MB, Arrival, Codec, Fate, Range, Wire

_MARGINS = {8: 4.0, 4: 1.5}
"""By bits, the factor by which a difference may grow from one exchange to the next; rounding a step
up to a power of two adds to it. Four bits cannot afford more."""

_KEPT_SHARE = 0.9
"""The share of the range that is kept at least after an exchange with smaller differences:
neighbours of other rounds may be farther apart."""

_WIDENING = 4.0
"""The factor by which a range grows after a message that could not be decoded; squared after the
next one, then cubed. After two or more failures it shrinks by this factor: it is then too wide."""

_SMALLEST_STEP, _LARGEST_STEP = 2.0**-90, 2.0**90
"""Within these bounds every intermediate result is a normal number: nothing is lost to underflow or
overflow."""

_ROUNDS_CHECKED = 64

_HEADER = struct.Struct("<ddQQ")
"""Step, range, checksum of places, and a CRC of these three; the step of a mark is NaN."""

_MODULUS = 1 << 64
_FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that multiplying by it is invertible modulo 2^64; its bits have no pattern."""


@cache
def _factors() -> Tensor:
    """Return a pseudorandom odd factor for every element of a block (splitmix64).

    Decoding errors are multiples of 2^b. If factors were an arithmetic series, errors at the four
    corners of a rectangle in a weight matrix, such as the largest values of an outer product, would
    cancel in the checksum.
    """
    z = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(_FACTOR)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64))


class _Header(NamedTuple):
    step: float
    range: float
    checksum: int = 0
    """Checksum of places."""


@final
@dataclass(frozen=True, repr=False)
class Modulo(Wire):
    """Places on a lattice, modulo 2^bits.

    Args:
        bits: per number, 8 or 4.
    """

    bits: int = 8

    name = "modulo"
    write_passes, read_passes = 4.0, 6.5
    bucket_mb = CODED_BUCKET_MB
    on_cpu_only = True

    def __post_init__(self) -> None:
        if self.bits not in _MARGINS:
            raise UserError(
                f"modulo has 8 or 4 bits per number, got {self.bits}; use modulo(bits=8)"
            )

    def __repr__(self) -> str:
        return f"{self.name}(bits={self.bits})"

    def check(
        self, algorithm: Algorithm, schedule: Schedule, *, rounds_are_chosen: bool = False
    ) -> None:
        """Raise for states whose range is unknown, and for all-reduces."""
        if rounds_are_chosen:
            raise UserError(
                f"{self} needs rounds of messages, got a control, which may choose an all-reduce "
                "when workers are too far apart; use wire='bf16' or 'fp32', or leave control out"
            )
        unknown = "weighted parameters" if algorithm.weighted else ", ".join(algorithm.tracked)
        if unknown:
            raise UserError(
                f"{self} needs states whose differences stay within a range, got {algorithm.name}, "
                f"which exchanges {unknown}; use wire='bf16', which encodes any"
            )
        for step in range(min(schedule.period or _ROUNDS_CHECKED, _ROUNDS_CHECKED)):
            self.check_round(schedule.round(step), f"at step {step} of {schedule.name}")

    def check_round(self, round: Round, where: str) -> None:
        """Raise for an all-reduce: it would sum places modulo 2^b, which cannot be decoded."""
        if round.reduces.any():
            raise UserError(
                f"{self} needs rounds of messages, got an all-reduce {where}; use wire='bf16' or "
                "'fp32', or a topology without groups of three, such as one_peer_exponential"
            )

    def num_bytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes of a header, and one per number, or per two numbers of 4 bits."""
        return _HEADER.size + (numel * self.bits + 7) // 8

    def codec(self, dtype: torch.dtype, device: torch.device) -> Codec:
        """Return the codec of lattice messages."""
        return _ModuloCodec(self, dtype, device)


@final
class _ModuloCodec(Codec):
    """Messages are bytes: a header, then block after block."""

    has_range = True

    def __init__(self, wire: Modulo, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._wire = wire
        double = self.work == torch.float64
        self._lift = 1.5 * 2.0 ** (52 if double else 23)
        self._most_places = 2.0 ** (50 if double else 21)
        # - Scratch; see Note [Places in the bits of a float]
        self._lifted = torch.empty(BLOCK, dtype=self.work)
        self._bits = self._lifted.view(torch.int64 if double else torch.int32)
        self._other = torch.empty(BLOCK, dtype=self.work)
        self._low = torch.empty(BLOCK, dtype=torch.int8)
        self._sent = torch.empty(BLOCK, dtype=torch.int8)
        self._places_off = torch.empty(0, dtype=torch.int8)
        self._factors = _factors()

    # - Sending

    def new_message(self, numel: int) -> Tensor:
        return torch.zeros(self._wire.num_bytes(numel, 0), dtype=torch.uint8)

    def encode(self, x: Tensor, range: float, message: Tensor) -> float:
        step = self._step_of(range)
        checksum, largest = self._write(x, step, message)
        # Beyond it, x + C leaves the binade of C, and bits are no longer places. Rare: differences
        # are then as small as float rounding.
        if largest > self._most_places * step:
            step = _power_of_two(largest / self._most_places)
            checksum, _ = self._write(x, step, message)
        _write_header(message, _Header(step, range, checksum))
        return largest

    def mark(self, message: Tensor) -> None:
        _write_header(message, _Header(math.nan, 0.0))

    def _write(self, x: Tensor, step: float, message: Tensor) -> tuple[int, float]:
        """Encode places; return their checksum, and the largest absolute value."""
        checksum, largest = 0, 0.0
        for block, payload in self._blocks(x, message):
            self._lift_(block, step)
            checksum = self._add_checksum(checksum, len(block))
            self._pack(len(block), payload)
            low, high = block.aminmax()
            largest = max(largest, -float(low), float(high))
        return checksum, largest

    def _pack(self, n: int, payload: Tensor) -> None:
        if self._wire.bits == 8:
            payload.copy_(self._bits[:n])
            return
        low, half = self._low, len(payload)
        low[n : 2 * half] = 0
        low[:n].copy_(self._bits[:n])  # the low byte
        high = torch.bitwise_left_shift(low[half : 2 * half], 4, out=self._sent[:half])
        torch.bitwise_and(low[:half], 15, out=payload)
        payload.bitwise_or_(high)

    # - Receiving

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
        header = _read_header(message)
        if header is None:  # corrupt: not even its range may be used
            return Arrival(Fate.UNDECODED)
        if math.isnan(header.step):
            return Arrival(Fate.MARKED)
        off = self._differences_to(x, message, header)
        if off is None:  # by the step, not the range: that is zero at first, and would stay zero
            return Arrival(Fate.UNDECODED, range=self._range_of(header.step))
        sent = _read_header(own)
        assert sent is not None, "what was sent must stay as it is until it is mixed"
        steps = header.step, sent.step
        low, high = map(int, off.aminmax()) if len(off) else (0, 0)
        # A place is up to half a step from its number, so m places may be m - 1/2 steps.
        seen = header.step * max(0.0, max(-low, high) - 0.5)
        if mutual and not self._other_decodes(x, off, max(-low, high), steps):
            return Arrival(Fate.ONE_SIDED, seen, header.range)
        parts = zip(self._differences(x, off, steps), into.split(BLOCK), strict=True)
        for difference, total in parts:
            difference.mul_(weight)
            total.copy_(difference) if first else total.add_(difference)
        return Arrival(Fate.TAKEN, seen, header.range)

    def _other_decodes(self, x: Tensor, off: Tensor, most: int, steps: tuple[float, float]) -> bool:
        """Return whether the other end decodes this worker's message; see Note [Both or none]."""
        if steps[0] == steps[1] or not len(off):
            apart = most * steps[0]
        else:
            apart = max(float(d.abs_().max()) for d in self._differences(x, off, steps))
        fine, coarse = min(steps), max(steps)
        most_off = (2 ** (self._wire.bits - 1) - 1) * fine
        return apart <= (most_off if fine == coarse else most_off - coarse / 2)

    def _differences_to(self, x: Tensor, message: Tensor, header: _Header) -> Tensor | None:
        """Return the sender's places minus the receiver's; None if the checksum does not match."""
        if len(self._places_off) < len(x):
            self._places_off = torch.empty(len(x), dtype=torch.int8)
        off, checksum = self._places_off[: len(x)], 0
        blocks = zip(self._blocks(x, message), off.split(BLOCK), strict=False)
        for (block, payload), places in blocks:
            n = len(block)
            self._lift_(block, header.step)
            self._low[:n].copy_(self._bits[:n])
            if self._wire.bits == 8:
                torch.sub(payload, self._low[:n], out=places)
            else:
                self._unpack_(payload, n, places)
            self._bits[:n].add_(places)
            checksum = self._add_checksum(checksum, n)
        return off if header.checksum == checksum else None

    def _unpack_(self, payload: Tensor, n: int, places: Tensor) -> None:
        """Subtract in the upper half of bytes, where four bits wrap around as eight bits do."""
        half = len(payload)
        torch.bitwise_left_shift(payload, 4, out=self._sent[:half])
        torch.bitwise_and(payload, -16, out=self._sent[half : 2 * half])
        own = self._low[:n].bitwise_left_shift_(4)
        torch.sub(self._sent[:n], own, out=places)
        places.bitwise_right_shift_(4)

    def _differences(self, x: Tensor, off: Tensor, steps: tuple[float, float]) -> Iterator[Tensor]:
        """Yield blocks of s_j k_j − s_i k_i, in scratch; s (k_j − k_i) where steps are equal."""
        step, own_step = steps
        for block, places in zip(x.split(BLOCK), off.split(BLOCK), strict=True):
            difference = self._other[: len(block)].copy_(places).mul_(step)
            if step != own_step:
                difference.add_(self._rounded(block, step)).sub_(self._rounded(block, own_step))
            yield difference

    def add_own(self, own: Tensor, factor: float, into: Tensor, *, first: bool) -> None:
        raise AssertionError("rejected by check(): weights must sum to one")

    # - Ranges

    def first_range(self, x: Tensor, start: Tensor) -> float:
        largest = 0.0
        for block, before in zip(x.split(BLOCK), start.split(BLOCK), strict=True):
            if len(block):
                low, high = self._other[: len(block)].copy_(block).sub_(before).aminmax()
                largest = max(largest, -float(low), float(high))
        return 2 * largest

    def next_range(self, range: Range, largest: float, arrivals: Sequence[Arrival]) -> Range:
        # A one-sided message was decoded, so its difference is known, and widening by a guess would
        # lose precision.
        heard = max([range.width, *(arrival.range for arrival in arrivals)])
        seen = max((arrival.seen for arrival in arrivals), default=0.0)
        too_narrow = [a.range for a in arrivals if a.fate is Fate.UNDECODED]
        if too_narrow:
            wider = _WIDENING ** (range.failures + 1) * max(too_narrow)
            return self._range(max(heard, seen, min(wider, 2 * largest)), range.failures + 1)
        if any(arrival.fate is Fate.ONE_SIDED for arrival in arrivals):
            return self._range(max(heard, seen), range.failures)
        if not any(arrival.fate is Fate.TAKEN for arrival in arrivals):
            return range
        kept = 1 / _WIDENING if range.failures > 1 else _KEPT_SHARE
        return self._range(max(kept * heard, seen), max(range.failures - 1, 0))

    def _range(self, width: float, failures: int) -> Range:
        return Range(min(width, self._range_of(_LARGEST_STEP)), failures)

    def _step_of(self, range: float) -> float:
        """Return the step of a lattice that decodes all differences within a range."""
        return _power_of_two(range / self._range_of(1.0))

    def _range_of(self, step: float) -> float:
        """Return the largest range that a step allows, with the margin for growth."""
        # Both ends are rounded, which adds up to one place to a difference: hence 2, not 1.
        most_off = 2 ** (self._wire.bits - 1) - 2
        return step * most_off / _MARGINS[self._wire.bits]

    # - Blocks

    def _blocks(self, x: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of numbers, and of the message's payload as signed bytes."""
        payload = message[_HEADER.size :].view(torch.int8)
        if len(x):
            yield from zip(x.split(BLOCK), payload.split(BLOCK * self._wire.bits // 8), strict=True)

    def _lift_(self, block: Tensor, step: float) -> Tensor:
        """Add C, in scratch: then bits are places; see Note [Places in the bits of a float]."""
        lifted = self._lifted[: len(block)]
        if block.dtype == self.work:
            return torch.add(block, self._lift * step, out=lifted)
        return lifted.copy_(block).add_(self._lift * step)

    def _rounded(self, block: Tensor, step: float) -> Tensor:
        return self._lift_(block, step).sub_(self._lift * step)

    def _add_checksum(self, checksum: int, n: int) -> int:
        """Extend a checksum by the places in scratch."""
        if self.work == torch.float32:  # two places in one integer
            self._bits[n : n + n % 2] = 0
            words = self._bits[: n + n % 2].view(torch.int64)
        else:
            words = self._bits[:n]
        product = int(torch.dot(words, self._factors[: len(words)]))
        return (checksum * _FACTOR + product) % _MODULUS


def _power_of_two(least: float) -> float:
    """Return the smallest power of two that is at least so large."""
    mantissa, exponent = math.frexp(max(least, _SMALLEST_STEP))
    return min(math.ldexp(1.0, exponent - (mantissa == 0.5)), _LARGEST_STEP)


def _write_header(message: Tensor, header: _Header) -> None:
    written = _HEADER.pack(*header, _crc_of(header))
    message[: _HEADER.size].numpy()[:] = np.frombuffer(written, np.uint8)


def _read_header(message: Tensor) -> _Header | None:
    """Return the header of a message; None if its CRC does not match."""
    *fields, crc = _HEADER.unpack(message[: _HEADER.size].numpy().tobytes())
    header = _Header(*fields)
    return header if crc == _crc_of(header) else None


def _crc_of(header: _Header) -> int:
    return zlib.crc32(_HEADER.pack(*header, 0))
