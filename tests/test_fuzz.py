"""A share of what ``python -m benchmarks.fuzz`` tries, and that it finds what it looks for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from benchmarks.fuzz import hunt
from benchmarks.fuzz.kinds import KINDS, Kind
from gossamer.errors import UserError

SHARE = 60
"""Inputs of each kind: a few seconds."""


@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_taken_or_refused_in_words(name: str) -> None:
    """No traceback, no hang and nothing half-written, whatever is given."""
    found = hunt.hunt(KINDS[name], SHARE)
    assert [failure.trace for failure in found.failures.values()] == []
    assert found.tried >= SHARE // 2  # simple kinds run out of inputs that differ


def test_the_shares_of_all_kinds_are_a_whole() -> None:
    """A hundred thousand inputs are that many."""
    assert sum(kind.share for kind in KINDS.values()) == 100


def refuse(number: int, folder: Path) -> None:
    if number % 2:
        raise UserError("a number must be even")


def stumble(number: int, folder: Path) -> None:
    raise KeyError(number)


def babble(number: int, folder: Path) -> None:
    raise UserError("x" * 10**6)


def hang(number: int, folder: Path) -> None:
    try:
        time.sleep(60)
    except Exception:
        raise UserError("interrupted") from None


@pytest.mark.parametrize(
    ("use", "failures"), [(refuse, []), (stumble, ["KeyError"]), (babble, ["UserError"])]
)
def test_what_is_not_refused_in_words_is_found(use: Any, failures: list[str]) -> None:
    """Another exception and a message that nobody reads are failures, each told once."""
    found = hunt.hunt(Kind(st.integers(0, 100), use, 1), 20)
    assert found.tried == 20
    assert [where.split()[0] for where in found.failures] == failures
    assert (found.refused > 0) == (use is refuse)


def test_a_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit, also where the code that hangs takes every exception for its own."""
    monkeypatch.setattr(hunt, "LIMIT_S", 0.2)
    found = hunt.hunt(Kind(st.just(0), hang, 1), 1)
    assert [where.split()[0] for where in found.failures] == ["Hang"]
