"""Wire formats by themselves: what a message decodes to, and how a wrong one is detected."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import UserError
from gossamer.wire import (
    WIRES,
    Arrival,
    Codec,
    Differences,
    Fate,
    Outbox,
    Packing,
    load_outboxes,
    parse_wire,
)
from gossamer.wire.wire import BLOCK

ALL_WIRES = [*WIRES, "modulo(bits=4)"]
CODED = [wire for wire in ALL_WIRES if wire != "fp32"]
RANGED = ["modulo(bits=8)", "modulo(bits=4)"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
CPU = torch.device("cpu")


def codec_of(wire: str, dtype: torch.dtype = torch.float32) -> Codec:
    codec = parse_wire(wire).codec(dtype, CPU)
    assert codec is not None
    return codec


class Pair:
    """Two workers that started equal, with messages for each other."""

    def __init__(
        self, wire: str, numel: int, dtype: torch.dtype = torch.float32, apart: float = 1e-2
    ) -> None:
        dice = torch.Generator().manual_seed(numel)
        start = torch.randn(numel, generator=dice)
        self.codec = codec_of(wire, dtype)
        self.x = [(start + apart * torch.randn(numel, generator=dice)).to(dtype) for _ in range(2)]
        self.sent = [Outbox(self.codec, numel, start.to(dtype)) for _ in self.x]
        for outbox, x in zip(self.sent, self.x, strict=True):
            outbox.fill(x)

    def taken(self, worker: int, weight: float = 0.5) -> tuple[Arrival, Tensor]:
        """Return how a worker decodes the other's message, and the sum that it adds."""
        total = torch.full((len(self.x[0]),), math.nan, dtype=self.codec.work)
        message, own = self.sent[1 - worker].message, self.sent[worker].message
        arrival = self.codec.take(message, own, self.x[worker], weight, total, first=True)
        return arrival, total

    def at_rest(self) -> bool:
        """Whether the other's message was not mixed."""
        arrival, total = self.taken(0)
        return arrival.fate is not Fate.TAKEN and bool(total.isnan().all())


@pytest.mark.parametrize("wire", CODED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [7, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
def test_two_workers_move_by_the_same(wire: str, dtype: torch.dtype, numel: int) -> None:
    """One worker gains what the other loses, to the bit, so the mean is conserved; in any blocks.

    The deviation from half of the difference is bounded by the step of the lattice.
    """
    pair = Pair(wire, numel, dtype)
    (one, up), (other, down) = pair.taken(0), pair.taken(1)
    assert one.fate is other.fate is Fate.TAKEN
    assert torch.equal(up, -down)
    difference = (pair.x[1].to(up.dtype) - pair.x[0].to(up.dtype)) / 2
    coarse = {"bf16": 2**-6}.get(wire, 0.25 if wire.endswith("4)") else 0.02) * float(
        1 if wire == "bf16" else difference.abs().max() * 4
    )
    assert float((up - difference).abs().max()) <= coarse


@pytest.mark.parametrize("wire", ALL_WIRES)
@pytest.mark.parametrize("numel", [0, 1, 1000, BLOCK + 3])
def test_the_size_of_a_message_is_known_before_it_is_made(wire: str, numel: int) -> None:
    """The planned and counted size is the size that is sent."""
    format = parse_wire(wire)
    codec = format.codec(torch.float32, CPU)
    message = torch.zeros(numel) if codec is None else codec.new_message(numel)
    assert message.nbytes == format.num_bytes(numel, itemsize=4)


@pytest.mark.parametrize("wire", CODED)
def test_an_empty_bucket_travels(wire: str) -> None:
    """A parameter without elements can be sent."""
    pair = Pair(wire, 0)
    assert pair.taken(0)[0].fate is Fate.TAKEN


@pytest.mark.parametrize("wire", CODED)
def test_a_mark_is_known_for_one(wire: str) -> None:
    """A mark is recognized, and not mixed."""
    pair = Pair(wire, 100)
    pair.sent[1].fill_mark()
    assert pair.taken(0)[0].fate is Fate.MARKED
    assert pair.at_rest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_bf16_would_round_to_infinity_stays_finite(dtype: torch.dtype) -> None:
    """The difference of the largest numbers of opposite signs is finite."""
    codec, most = codec_of("bf16", dtype), torch.finfo(dtype).max
    xs = [torch.tensor([1.0, most], dtype=dtype), torch.tensor([1.0, -most], dtype=dtype)]
    sent = [codec.new_message(2) for _ in xs]
    for x, message in zip(xs, sent, strict=True):
        codec.encode(x, 0.0, message)
    total = torch.empty(2, dtype=dtype)
    assert codec.take(sent[1], sent[0], xs[0], 0.5, total, first=True).fate is Fate.TAKEN
    assert bool(total.isfinite().all())
    assert float(total[1]) < -1e37


# - Modulo


@pytest.mark.parametrize("wire", RANGED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_within_the_range_every_place_is_told(wire: str, data: st.DataObject) -> None:
    """Whatever the steps of both ends, the sender's rounded numbers are decoded exactly."""
    codec = codec_of(wire, torch.float64)
    numbers = st.floats(-1e3, 1e3, allow_nan=False)
    mine = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=9)), dtype=torch.float64)
    apart = data.draw(st.floats(1e-6, 10))
    off = [data.draw(st.floats(-apart, apart)) for _ in mine]
    theirs = mine + torch.tensor(off, dtype=torch.float64)
    sent, own = codec.new_message(len(mine)), codec.new_message(len(mine))
    codec.encode(theirs, apart, sent)
    codec.encode(mine, apart * data.draw(st.floats(0.1, 10)), own)
    total = torch.empty_like(mine)
    arrival = codec.take(sent, own, mine, 1.0, total, first=True)
    assert arrival.fate is Fate.TAKEN
    (step,) = torch.frombuffer(bytearray(sent[:8].numpy().tobytes()), dtype=torch.float64).tolist()
    (own_step,) = torch.frombuffer(
        bytearray(own[:8].numpy().tobytes()), dtype=torch.float64
    ).tolist()
    expected = (theirs / step).round() * step - (mine / own_step).round() * own_step
    assert torch.equal(total, expected)


@pytest.mark.parametrize("wire", RANGED)
@settings(max_examples=150, deadline=None)
@given(
    apart=st.floats(1e-4, 1e2),
    ranges=st.tuples(st.floats(1e-3, 1e2), st.floats(1e-3, 1e2)),
    seed=st.integers(0, 1000),
)
def test_both_take_the_others_message_or_neither(
    wire: str, apart: float, ranges: tuple[float, float], seed: int
) -> None:
    """For any two ranges of workers that send to each other, the mean is conserved bit for bit."""
    codec, dice = codec_of(wire), torch.Generator().manual_seed(seed)
    start = torch.randn(64, generator=dice)
    xs = [start, start + apart * (2 * torch.rand(64, generator=dice) - 1)]
    sent = [codec.new_message(64) for _ in xs]
    for x, range_, message in zip(xs, ranges, sent, strict=True):
        codec.encode(x, range_, message)
    totals = [torch.zeros(64) for _ in xs]
    arrivals = [
        codec.take(sent[1 - i], sent[i], xs[i], 0.5, totals[i], first=True, mutual=True)
        for i in range(2)
    ]
    assert (arrivals[0].fate is Fate.TAKEN) == (arrivals[1].fate is Fate.TAKEN)
    assert torch.equal(totals[0], -totals[1])


ERRORS = [
    {3: 1, 8: -1},
    {3: 1, 4: -2, 5: 1},
    {3: 1, 8: -1, 35: -1, 40: 1},
    {0: 1, 1: -1, 2: -1, 3: 1},
]
"""By index, in wraps: two, a second difference, the corners of two rectangles in a matrix."""


@pytest.mark.parametrize("wire", RANGED)
@pytest.mark.parametrize("errors", ERRORS)
def test_errors_do_not_make_up_for_each_other(wire: str, errors: dict[int, int]) -> None:
    """The checksum detects errors that a sum, plain or weighted by the index, would miss."""
    pair = Pair(wire, 1000)
    step, range = pair.sent[1].message[:16].view(torch.float64).tolist()
    wraps = 2 ** (8 if "8" in wire else 4)
    for index, number in errors.items():
        pair.x[1][index] += number * wraps * step
    pair.codec.encode(pair.x[1], range, pair.sent[1].message)
    assert pair.taken(0)[0].fate is Fate.UNDECODED


@pytest.mark.parametrize("wire", RANGED)
@pytest.mark.parametrize("byte", [0, 7, 12, 20, 28, 40, 500])
def test_a_message_that_was_changed_is_not_taken(wire: str, byte: int) -> None:
    """A wrong step, a wrong checksum, a wrong place: the message is not mixed."""
    pair = Pair(wire, 1000)
    pair.sent[1].message[byte] ^= 0x41
    assert pair.at_rest()
    if byte < 32:  # in the header: no range is learnt from it
        assert pair.taken(0)[0] == Arrival(Fate.UNDECODED)


@pytest.mark.parametrize("wire", RANGED)
def test_a_range_widens_until_it_is_wide_enough(wire: str) -> None:
    """Also from zero, as when workers were equal and one was replaced."""
    codec = codec_of(wire)
    start = torch.ones(50)
    xs = [start.clone(), start + torch.linspace(0.5, 1, 50)]
    sent = [Outbox(codec, 50, x.clone()) for x in xs]  # both say that nothing has moved
    exchanges = 0
    while exchanges < 20:
        exchanges += 1
        for outbox, x in zip(sent, xs, strict=True):
            outbox.fill(x)
        both = [
            Differences(codec, sent[i], xs[i], torch.empty(50), 0.5, [1 - i], keeps_rest=True)
            for i in range(2)
        ]
        both[0].take(sent[1].message, 1, 0.5)
        both[1].take(sent[0].message, 0, 0.5)
        undecoded = [len(each.undecoded) for each in both]
        for each in both:
            each.mix()
        if undecoded == [0, 0]:
            break
        assert torch.equal(xs[0], start)
    assert 1 < exchanges < 6
    assert float((xs[0] - xs[1]).abs().max()) < 0.6


def test_large_numbers_that_hardly_differ() -> None:
    """A step is never finer than the resolution of the numbers themselves."""
    codec = codec_of("modulo(bits=8)")
    x = torch.full((10,), 1e6)
    sent = [codec.new_message(10) for _ in range(2)]
    codec.encode(x, 1e-9, sent[0])
    codec.encode(x + 1, 1e-9, sent[1])
    total = torch.empty(10)
    assert codec.take(sent[1], sent[0], x, 0.5, total, first=True).fate is Fate.TAKEN
    assert float((total - 0.5).abs().max()) <= 0.25


def test_ranges_of_other_buckets_are_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """A state with as many buckets of other sizes resets all ranges, to the current numbers."""
    codec = codec_of("modulo(bits=8)")
    sizes, others = (30, 50), (50, 30)
    saved = [Outbox(codec, n, torch.zeros(n)) for n in sizes]
    for outbox in saved:
        outbox.settle([Arrival(Fate.TAKEN, seen=0.25, range=0.5)])
    states = [outbox.state_dict() for outbox in saved]
    loaded = [Outbox(codec, n, torch.zeros(n)) for n in sizes]
    load_outboxes(loaded, states, [torch.ones(n) for n in sizes])
    assert [outbox.state_dict() for outbox in loaded] == states
    assert not caplog.text
    anew = [Outbox(codec, n, torch.zeros(n)) for n in others]
    load_outboxes(anew, states, [torch.ones(n) for n in others])
    assert "another bucket_mb: ranges are reset" in caplog.text
    for outbox, numel in zip(anew, others, strict=True):
        assert torch.equal(outbox.state_dict()["start"], torch.ones(numel))


def test_fragments_that_fit_are_made() -> None:
    """Beside one large tensor small ones get buckets of their own; none is lost or repeated."""
    sizes = [1000, 100, 100, 100, 0]
    packing = Packing([torch.zeros(n) for n in sizes], bucket_mb=25, fragments=3)
    turns = [packing.at(step) for step in range(3)]
    assert sorted(bucket for turn in turns for bucket in turn) == [*range(len(packing.buckets))]
    assert sorted(i for bucket in packing.buckets for i in bucket) == [*range(5)]
    assert packing.at(3) == turns[0]
    with pytest.raises(UserError, match="fragments=5 needs at least as many parameters, got 4"):
        Packing([torch.zeros(n) for n in sizes], bucket_mb=25, fragments=5)
