"""Try many inputs of one kind, and continue after a failure; one input per failure is kept."""

from __future__ import annotations

import signal
import tempfile
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.fuzz.kinds import REFUSALS, Kind

LIMIT_S = 20.0
"""The time limit of one input: enough for a busy machine, and less than a hang."""


_LONGEST_MESSAGE = 5000


class Hang(BaseException):
    """An input took too long. A BaseException, so that no ``except Exception`` catches it."""


class Failure(NamedTuple):
    """An unexpected error, and the input that caused it."""

    where: str
    """The error, and the line that raised it; failures with the same signature count as one."""

    given: str
    trace: str


@dataclass
class Found:
    """The results of the inputs of one kind."""

    tried: int = 0
    refused: int = 0
    failures: dict[str, Failure] = field(default_factory=dict[str, Failure])


def hunt(kind: Kind, count: int, number: int = 0) -> Found:
    """Try so many inputs.

    Args:
        kind: of inputs.
        count: how many.
        number: which ones: a seed.
    """
    found = Found()

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(kind.strategy)
    def attempt(given: Any) -> None:
        found.tried += 1
        try:
            with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, _limited():
                warnings.simplefilter("error")
                kind.use(given, Path(folder))
        except (Exception, Hang) as error:
            if isinstance(error, REFUSALS) and len(str(error)) <= _LONGEST_MESSAGE:
                found.refused += 1
            else:
                failure = _failure(error, given)
                found.failures.setdefault(failure.where, failure)

    attempt()
    return found


@contextmanager
def _limited() -> Generator[None]:
    def stop(number: int, frame: Any) -> NoReturn:
        raise Hang(f"more than {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _failure(error: BaseException, given: Any) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    last = [frames[-1], *(frame for frame in frames if "gossamer" in frame.filename)][-1]
    where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
    return Failure(where, repr(given)[:2000], "".join(traceback.format_exception(error)[-12:]))
