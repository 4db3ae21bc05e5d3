"""Threads of runs: as the user set them, or a share of the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gossamer.bench import Store, threads
from gossamer.records import Started

EXPERIMENT = """
name = "one"
workload = "digits-mlp"
workers = 2
methods = "D_ring"
run = { epochs = 1, steps_per_epoch = 1, evaluate_replicas = 0 }
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables of OpenMP, six cores, and afterwards as many threads as before."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "count_cores", lambda: 6)
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("jobs", "expected"), [(1, 6), (2, 3), (3, 1), (6, 1), (9, 1)])
def test_runs_share_the_cores(jobs: int, expected: int) -> None:
    """By default; a run with two cores has one thread, because two wait for each other."""
    assert threads.threads_per_run(jobs) == expected


def test_a_script_that_set_fewer_threads_has_runs_with_as_many() -> None:
    """torch.set_num_threads in the process that starts runs limits their threads."""
    torch.set_num_threads(2)
    assert threads.threads_per_run(1) == 2


def test_what_the_user_set_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS is the number of threads of each run, even with fewer cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)  # as torch does when it is imported
    assert [threads.threads_per_run(jobs) for jobs in (1, 4)] == [3, 3]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"OMP_NUM_THREADS": "1", **threads.WAIT}),
        ({"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3", **threads.WAIT}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "9"}, {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "9"}),
    ],
)
def test_runs_start_with_our_variables_where_the_user_has_none(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: dict[str, str]
) -> None:
    """A wait policy that the user set by either variable is kept; the environment is restored."""
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with threads.variables_of_runs():
        assert {name: os.environ[name] for name in os.environ if "OMP_" in name} == expected
    assert {name: os.environ[name] for name in os.environ if "OMP_" in name} == given


@pytest.mark.timeout(150)
def test_one_job_does_not_override_the_variable(tmp_path: Path) -> None:
    """`OMP_NUM_THREADS=2 gossamer bench run --jobs 1` has two threads, and records that.

    By default it would have one on two cores or fewer, and three or more on more.
    """
    file = tmp_path / "one.toml"
    file.write_text(EXPERIMENT)
    command = [sys.executable, "-m", "gossamer", "bench", "run", str(file), "--jobs", "1"]
    subprocess.run(
        [*command, "--out", str(tmp_path)], env=os.environ | {"OMP_NUM_THREADS": "2"}, check=True
    )
    (story,) = Store(tmp_path).stories()
    started = story.records[0]
    assert isinstance(started, Started)
    assert started.environment["threads"] == "2"
