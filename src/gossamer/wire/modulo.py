"""Eight or four bits per number: its place on a lattice, modulo the number of places that fit.

    k_j = round(x_j / s_j)                                    s_j, the step of j's lattice
    q_j = k_j mod 2^b                                         what travels, with s_j
    k_j = r + ((q_j − r + 2^(b−1)) mod 2^b) − 2^(b−1)         at i, with r = round(x_i / s_j)
    x_i + Σ_j w_ij (s_j k_j − s_i k_i)

Neighbours are much nearer to each other than to zero, so that the low bits of a place tell which
one is meant: a lattice is as fine as b bits make it over the *range* of differences, not of values.
Nothing is kept of other workers, which suits rounds that change. Reference: Lu and De Sa, Moniqua
(https://arxiv.org/abs/2002.11787), here with nearest rounding.

- The range comes from the largest difference that was seen; a worker that hears of a larger range
  from a neighbour takes that. So all have nearly the same one, also where they do not send to those
  that they receive from. Before its first exchange a worker knows how far it went from the common
  start; others may have gone as far the other way. It knows nothing else until something moves.
- A step is a power of two: what is done with places is then exact, in whatever order.
- If a difference is outside of the range, a place is taken for another. A checksum of all places,
  in the header, tells; nothing of such a message is mixed, and the range is widened: the more, the
  more often in a row. By itself no worker widens it to more than twice its largest number: two
  numbers are no farther apart than twice the larger of them, and ranges travel.

Note [Places in the bits of a float]
Near C = 1.5 · 2^23 s float32 numbers are s apart (float64: 2^52). So x + C is x rounded to the
lattice, half to even, and its bits, read as an integer, are those of C plus k. Low bits of that
integer are the message, k may be added to them, and subtracting C makes a number of it again. That
holds for |x| < 2^22 s; a step is never so small that x is beyond half of it, and what is decoded by
a receiver that is itself beyond it has a wrong checksum.

Note [Both or none]
Where i and j send to each other, the mean stays if both take the other's message, or neither does.
Ranges are each sender's own, so that one may be wide enough and the other not. But who has decoded
a message knows d = s_j k_j − s_i k_i, exactly what the other knows if it has, too; and it implies
that the other has, if it is small enough. Where steps are equal, d is as many of them as places
are off, at both ends. Where f is the finer and c the coarser step, all places on the coarse lattice
are places on the fine one, from which its sender is at most c/2 away, and so c/2f fine places. Up
to 2^(b−1) − 1 of them can be told: both take if |d| ≤ (2^(b−1) − 1) f − c/2.
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
"""By how much a difference may grow from one exchange to the next; rounding a step up to a power of
two allows for more. Four bits have none to spare."""

_KEPT_SHARE = 0.9
"""Of the range, where less was seen: neighbours of other rounds may be farther apart."""

_WIDENING = 4.0
"""By how much a range grows after a message that could not be decoded; after the next one by the
square of it, then by its cube. It shrinks by it after two or more, as it has become too wide."""

_SMALLEST_STEP, _LARGEST_STEP = 2.0**-90, 2.0**90
"""Between them all that is computed is a normal number."""

_ROUNDS_CHECKED = 64

_HEADER = struct.Struct("<ddQQ")
"""Step, range, checksum of places, and one of the three; the step of a mark is NaN."""

_MODULUS = 1 << 64
_FACTOR = 0x9E3779B97F4A7C15
"""Odd, with bits everywhere."""


@cache
def _factors() -> Tensor:
    """Return an odd factor for every place of a block, with no pattern in them (splitmix64).

    Errors are multiples of 2^b. Were factors an arithmetic series, four of them at the corners of a
    rectangle in a weight matrix, as the largest numbers of an outer product are, would cancel.
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
    """Of places."""


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
        """Refuse states of which no range is known, and all-reduces."""
        if rounds_are_chosen:
            raise UserError(
                f"{self} needs rounds of messages, got a control, which may take an all-reduce "
                "where workers are too far apart; use wire='bf16' or 'fp32', or leave control out"
            )
        unknown = "what it shares out" if algorithm.weighted else ", ".join(algorithm.tracked)
        if unknown:
            raise UserError(
                f"{self} needs states whose differences stay within a range, got {algorithm.name}, "
                f"which also exchanges {unknown}; use wire='bf16', which takes any"
            )
        for step in range(min(schedule.period or _ROUNDS_CHECKED, _ROUNDS_CHECKED)):
            self.check_round(schedule.round(step), f"at step {step} of {schedule.name}")

    def check_round(self, round: Round, where: str) -> None:
        """Refuse an all-reduce: sums of places are no places."""
        if round.reduces.any():
            raise UserError(
                f"{self} needs rounds of messages, got an all-reduce {where}; use wire='bf16' or "
                "'fp32', or a topology without groups of three, such as one_peer_exponential"
            )

    def num_bytes(self, numel: int, itemsize: int) -> int:
        """A header, and a byte per number or per two."""
        return _HEADER.size + (numel * self.bits + 7) // 8

    def codec(self, dtype: torch.dtype, device: torch.device) -> Codec:
        """Return what finds places, and whose they are."""
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
        if largest > self._most_places * step:  # rare: as differences are smaller than rounding
            step = _power_of_two(largest / self._most_places)
            checksum, _ = self._write(x, step, message)
        _write_header(message, _Header(step, range, checksum))
        return largest

    def mark(self, message: Tensor) -> None:
        _write_header(message, _Header(math.nan, 0.0))

    def _write(self, x: Tensor, step: float, message: Tensor) -> tuple[int, float]:
        """Write places; return their checksum, and the largest number."""
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
        if header is None:  # nothing that it says is learnt from
            return Arrival(Fate.UNDECODED)
        if math.isnan(header.step):
            return Arrival(Fate.MARKED)
        off = self._differences_to(x, message, header)
        if off is None:  # a range that was zero can be widened, too
            return Arrival(Fate.UNDECODED, range=self._range_of(header.step))
        sent = _read_header(own)
        assert sent is not None, "what was sent must stay as it is until it is mixed"
        steps = header.step, sent.step
        low, high = map(int, off.aminmax()) if len(off) else (0, 0)
        # Places are up to half a step from numbers.
        seen = header.step * max(0.0, max(-low, high) - 0.5)
        if mutual and not self._other_decodes(x, off, max(-low, high), steps):
            return Arrival(Fate.ONE_SIDED, seen, header.range)
        parts = zip(self._differences(x, off, steps), into.split(BLOCK), strict=True)
        for difference, total in parts:
            difference.mul_(weight)
            total.copy_(difference) if first else total.add_(difference)
        return Arrival(Fate.TAKEN, seen, header.range)

    def _other_decodes(self, x: Tensor, off: Tensor, most: int, steps: tuple[float, float]) -> bool:
        """Return whether both workers can decode each other's message; see Note [Both or none]."""
        if steps[0] == steps[1] or not len(off):
            apart = most * steps[0]
        else:
            apart = max(float(d.abs_().max()) for d in self._differences(x, off, steps))
        fine, coarse = min(steps), max(steps)
        most_off = (2 ** (self._wire.bits - 1) - 1) * fine
        return apart <= (most_off if fine == coarse else most_off - coarse / 2)

    def _differences_to(self, x: Tensor, message: Tensor, header: _Header) -> Tensor | None:
        """Return how many places off the sender's numbers are; None where that is not known."""
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
        """Subtract in the upper half of bytes, where four bits wrap as eight do."""
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
        raise AssertionError("refused at the start: weights must sum to one")

    # - Ranges

    def first_range(self, x: Tensor, start: Tensor) -> float:
        largest = 0.0
        for block, before in zip(x.split(BLOCK), start.split(BLOCK), strict=True):
            if len(block):
                low, high = self._other[: len(block)].copy_(block).sub_(before).aminmax()
                largest = max(largest, -float(low), float(high))
        return 2 * largest

    def next_range(self, range: Range, largest: float, arrivals: Sequence[Arrival]) -> Range:
        # Where only the sender cannot decode, enough is known of the difference.
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
        """Return the step of a lattice on which differences within a range can be told."""
        return _power_of_two(range / self._range_of(1.0))

    def _range_of(self, step: float) -> float:
        """Return the range for which a step is just large enough."""
        # A difference may be a place more than it is steps, for both ends are rounded.
        most_off = 2 ** (self._wire.bits - 1) - 2
        return step * most_off / _MARGINS[self._wire.bits]

    # - Blocks

    def _blocks(self, x: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of numbers, and of the message as signed bytes."""
        payload = message[_HEADER.size :].view(torch.int8)
        if len(x):
            yield from zip(x.split(BLOCK), payload.split(BLOCK * self._wire.bits // 8), strict=True)

    def _lift_(self, block: Tensor, step: float) -> Tensor:
        """Bring numbers to where their bits are places, in scratch."""
        lifted = self._lifted[: len(block)]
        if block.dtype == self.work:
            return torch.add(block, self._lift * step, out=lifted)
        return lifted.copy_(block).add_(self._lift * step)

    def _rounded(self, block: Tensor, step: float) -> Tensor:
        return self._lift_(block, step).sub_(self._lift * step)

    def _add_checksum(self, checksum: int, n: int) -> int:
        """Return a checksum that includes the places in scratch."""
        if self.work == torch.float32:  # two places in one integer
            self._bits[n : n + n % 2] = 0
            words = self._bits[: n + n % 2].view(torch.int64)
        else:
            words = self._bits[:n]
        product = int(torch.dot(words, self._factors[: len(words)]))
        return (checksum * _FACTOR + product) % _MODULUS


def _power_of_two(least: float) -> float:
    """Return the power of two that is at least so large."""
    mantissa, exponent = math.frexp(max(least, _SMALLEST_STEP))
    return min(math.ldexp(1.0, exponent - (mantissa == 0.5)), _LARGEST_STEP)


def _write_header(message: Tensor, header: _Header) -> None:
    written = _HEADER.pack(*header, _crc_of(header))
    message[: _HEADER.size].numpy()[:] = np.frombuffer(written, np.uint8)


def _read_header(message: Tensor) -> _Header | None:
    """Return what a header says; None where it was changed on its way."""
    *fields, crc = _HEADER.unpack(message[: _HEADER.size].numpy().tobytes())
    header = _Header(*fields)
    return header if crc == _crc_of(header) else None


def _crc_of(header: _Header) -> int:
    return zlib.crc32(_HEADER.pack(*header, 0))
