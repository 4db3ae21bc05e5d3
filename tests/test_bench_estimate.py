"""Estimates of an experiment's time: from records, by measurement within a budget, or unknown."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.bench import Store, estimate
from gossamer.engine import RunSpec
from gossamer.records import Ended, Record, Started, Step


def spec(workers: int = 4, **more: Any) -> RunSpec:
    given = {"workload": "digits-mlp", "workers": workers, "topology": "ring", **more}
    return RunSpec.model_validate({"epochs": 1, "steps_per_epoch": 10, **given})


def keep(store: Store, ran: RunSpec, step_s: float) -> None:
    """Store the records of a run whose steps took so long."""
    steps = ran.num_steps
    started = Started(run_id=ran.id, spec=ran.model_dump(), environment={})
    with store.locked(""):
        ended = Ended(status="done", steps=steps, train_s=steps * step_s)
        store.conclude(started, os.getpid(), ended)


def test_without_records_nothing_is_run_and_nothing_claimed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps are only measured on request."""
    monkeypatch.setattr(estimate, "run", None)
    found = estimate.estimate([spec()], 1, Store(tmp_path))
    assert found == estimate.Estimate(None, recorded=0, measured=0, guessed=0)


def test_records_of_the_same_kind_tell_how_long_runs_take(tmp_path: Path) -> None:
    """Another seed or length is the same kind; another size scales; another model is unknown."""
    store = Store(tmp_path)
    keep(store, spec(seed=7, epochs=2), step_s=0.5)
    runs = [spec(seed=0), spec(seed=1)]
    assert estimate.estimate(runs, 2, store) == estimate.Estimate(5.0, 1, 0, 0)
    assert estimate.estimate(runs, 1, store).seconds == pytest.approx(10.0)
    larger = [*runs, spec(workers=12)]
    assert estimate.estimate(larger, 1, store) == estimate.Estimate(25.0, 1, 0, 1)
    assert estimate.estimate(larger, 3, store).seconds == pytest.approx(15.0)  # the longest
    other = [*runs, spec(workload="digits-cnn")]
    assert estimate.estimate(other, 1, store).seconds is None


@pytest.mark.parametrize("step_s", [0.02, 0.5])
def test_measuring_keeps_to_its_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step_s: float
) -> None:
    """However many kinds there are and however slow they are, but for one step; what takes the
    largest part is measured, the rest guessed from it, and no evaluation is made.
    """
    passed = [0.0]

    def slow(ran: RunSpec) -> Iterator[Record]:
        for step in itertools.count(1):
            assert step <= ran.num_steps, "an evaluation follows the last step"
            passed[0] += step_s
            yield Step.model_construct(step=step, train_s=step * step_s)

    monkeypatch.setattr(estimate, "run", slow)
    monkeypatch.setattr(estimate, "time", SimpleNamespace(monotonic=lambda: passed[0]))
    runs = [spec(workers=workers) for workers in range(2, 12)]
    found = estimate.estimate(runs, 1, Store(tmp_path), budget_s=0.6)
    assert passed[0] < 0.6 + step_s + 1e-9
    assert 1 <= found.measured < 10
    assert found.guessed == 10 - found.measured
    largest = step_s * 10 / 11  # per worker
    assert found.seconds == pytest.approx(largest * sum(range(2, 12)), rel=0.5)


def test_real_steps_are_measured(tmp_path: Path) -> None:
    """Also for distributed runs and runs with a budget."""
    runs = [spec(workers=2, engine="distributed"), spec(max_steps=3)]
    found = estimate.estimate(runs, 1, Store(tmp_path), budget_s=100.0)
    assert found.measured == 2
    assert found.seconds is not None
    assert found.seconds > 15  # what torchrun takes
