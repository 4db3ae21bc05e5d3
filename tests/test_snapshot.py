"""A state comes back from its file bit for bit, or not at all."""

from __future__ import annotations

import os
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers

from gossamer.errors import UserError
from gossamer.gossip import snapshot


def round_trip(state: Any, folder: Path) -> Any:
    path = folder / "state.safetensors"
    return snapshot.read(path, snapshot.write(path, state))


def assert_same(left: Any, right: Any) -> None:
    """Raise unless types, order, dtypes, strides and every bit are the same."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.numel() == 0 or left.stride() == right.stride()
        as_bytes = [t.contiguous().flatten().view(torch.uint8) for t in (left, right)]
        assert torch.equal(*as_bytes)
    elif isinstance(left, float):
        assert left.hex() == right.hex()  # also tells -0.0 from 0.0, and any NaN is one
    elif isinstance(left, dict):
        assert [*left] == [*right]
        assert [*map(type, left)] == [*map(type, right)]
        assert_same([*left.values()], [*right.values()])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float8_e4m3fn),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
]
TENSORS = st.builds(
    lambda dtype, shape, seed: torch.randint(
        -3, 4, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)
KEYS = st.text(max_size=3) | st.integers()
STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@given(state=STATES)
def test_any_state_comes_back(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is nested in whatever: types, order, keys and bits are as before."""
    folder = tmp_path_factory.getbasetemp()
    assert_same(round_trip(state, folder), state)


def test_names_that_look_the_same_do_not_meet(tmp_path: Path) -> None:
    """Dots in keys, numbers as texts, and names that the format uses itself."""
    names = ["a.b", "__metadata__", "structure.json", "1", 1, "", "ä"]
    state: dict[Any, Any] = {name: torch.tensor(n) for n, name in enumerate(names)}
    state["a"] = {"b": torch.tensor(-1)}
    assert_same(round_trip(state, tmp_path), state)


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    """Two names of one tensor; views of one storage and overlapping ones keep their values."""
    weight = torch.randn(1000)
    state = {"a": weight, "b": weight, "parts": [weight[:10], weight[10:20], weight[5:15]]}
    back = round_trip(state, tmp_path)
    assert_same(back, state)
    assert back["a"] is back["b"]
    assert (tmp_path / "state.safetensors").stat().st_size < 1.5 * weight.nbytes


def test_strides_come_back_where_tensors_are_dense(tmp_path: Path) -> None:
    """channels_last moments stay so; what has gaps or repeats is packed."""
    image = torch.randn(2, 3, 4, 5)
    dense = [
        image.to(memory_format=torch.channels_last),
        image.transpose(0, 3),
        nn.Parameter(image),
    ]
    back = round_trip({"dense": dense, "gaps": image[..., ::2]}, tmp_path)
    for before, after in zip(dense, back["dense"], strict=True):
        assert after.stride() == before.stride()
        assert torch.equal(after, before)
    assert torch.equal(back["gaps"], image[..., ::2])


def test_a_models_versions_come_back(tmp_path: Path) -> None:
    """load_state_dict reads them to decide whether a state is of an old version."""
    state: Any = nn.BatchNorm1d(3).state_dict()
    back = round_trip({"model": state}, tmp_path)["model"]
    assert back._metadata == state._metadata


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: np.cos(epoch / 9)),
    "multi_step": lambda o: schedulers.MultiStepLR(o, [2, 2, 9]),
    "one_cycle": lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=20),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.1, 0.2, 3),
    "warm_restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.5)], [3]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.StepLR(o, 2), schedulers.PolynomialLR(o, 9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_continue(name: str, tmp_path: Path) -> None:
    """The learning rates after loading are those of the run that was not stopped."""

    def make() -> tuple[Any, Any]:
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        optimizer.step()
        return optimizer, scheduler

    def rates(optimizer: Any, scheduler: Any) -> list[float]:
        seen: list[float] = []
        for _ in range(6):
            scheduler.step()
            seen.append(float(optimizer.param_groups[0]["lr"]))
        return seen

    saved, resumed = make(), make()
    rates(*saved)
    for old, new in zip(saved, resumed, strict=True):
        new.load_state_dict(round_trip(old.state_dict(), tmp_path))
    assert rates(*resumed) == rates(*saved)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Fraction(1, 2), "got Fraction at model.0"),
        ({1, 2}, "got set at model.0"),
        (np.int64(3), "got int64 at model.0"),
        ({(1, 2): 3}, r"got \(1, 2\) at model.0"),
        ({True: 3}, r"got True at model.0"),
        (torch.zeros(2, dtype=torch.complex128), "got torch.complex128, torch.strided on cpu"),
        (torch.eye(2).to_sparse(), "got torch.float32, torch.sparse_coo on cpu at model.0"),
        (torch.zeros(2, device="meta"), "on meta at model.0"),
    ],
)
def test_what_cannot_be_written_is_named(value: Any, words: str, tmp_path: Path) -> None:
    """With its place in the state, before a file is there."""
    with pytest.raises(UserError, match=words):
        snapshot.write(tmp_path / "state", {"model": [value]})
    assert not [*tmp_path.iterdir()]


def test_every_damage_is_noticed(tmp_path: Path) -> None:
    """One bit that changed, or an end that is missing, anywhere in the file."""
    path = tmp_path / "state"
    checksum = snapshot.write(path, {"a": torch.arange(30.0), "b": [1, "two", 3.0]})
    whole = path.read_bytes()
    places = random.Random(0)
    for _ in range(200):
        place, bit = places.randrange(len(whole)), places.randrange(8)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        for content in (damaged, whole[:place]):
            path.write_bytes(content)
            with pytest.raises(snapshot.DamagedError, match="must have the checksum"):
                snapshot.read(path, checksum)
    path.write_bytes(whole)
    assert snapshot.read(path, checksum)["b"] == [1, "two", 3.0]


def test_what_is_read_does_not_need_its_file(tmp_path: Path) -> None:
    """Its memory is its own: the file can change or go."""
    path = tmp_path / "state"
    state = snapshot.read(path, snapshot.write(path, {"a": torch.ones(5000)}))
    with path.open("rb+") as file:
        file.write(b"\0" * path.stat().st_size)
    os.truncate(path, 0)
    assert torch.equal(state["a"], torch.ones(5000))


def test_the_average_of_states() -> None:
    """Floating numbers in double precision, in their own dtype after; the rest is the first's."""

    def state(worker: int) -> dict[str, Any]:
        return {
            "single": torch.tensor([1e8, 1.0]) * (1 + worker),
            "half": torch.full((2, 2), 2.0 + worker, dtype=torch.bfloat16),
            "scalar": torch.tensor(float(worker)),
            "count": torch.tensor(worker),
            "list": [worker, (torch.tensor([worker + 0.5]), "text")],
        }

    mean = snapshot.average(state(worker) for worker in range(3))
    assert_same(
        mean,
        {
            "single": torch.tensor([2e8, 2.0]),
            "half": torch.full((2, 2), 3.0, dtype=torch.bfloat16),
            "scalar": torch.tensor(1.0),
            "count": torch.tensor(0),
            "list": [0, (torch.tensor([1.5]), "text")],
        },
    )


def test_states_with_other_tensors_are_not_averaged() -> None:
    """A worker whose optimizer never saw a gradient has no moments to average."""
    with pytest.raises(UserError, match=r"got a.1 \[2\] on worker 0 and absent on worker 1"):
        snapshot.average(iter([{"a": [1, torch.ones(2)]}, {"a": [1]}]))
