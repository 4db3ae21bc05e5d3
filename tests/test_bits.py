"""A run comes to the same bits again, however busy the machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.test_simulation import ALL_LAYERS, assert_same, make, run

STEPS = 4
SHORT = {"epochs": 1, "steps_per_epoch": STEPS, "log_every": 1, "evaluate_replicas": 0}
RUNS = [
    {"workload": "digits-mlp", "workers": 3, "topology": "ring"},  # one after the other
    {"workload": "digits-mlp", "workers": 16, "topology": "ring"},
    {"workload": "digits-mlp", "workers": 6, "topology": "centralized"},
    {"workload": "digits-cnn", "workers": 8, "topology": "ring"},
    {"workload": "stdlib-gpt", "workers": 4, "topology": "ring", "batch_size": 1},
]


@contextmanager
def busy_neighbours(num: int) -> Generator[None, None, None]:
    """Have so many processes compute beside a block."""
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()


def records(padding: int) -> list[str]:
    """Return the records of all runs in a new process, with so much more in its environment."""
    specs = json.dumps([SHORT | options for options in RUNS])
    done = subprocess.run(
        [sys.executable, "-m", "tests.run_bits", specs],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PADDING": padding * "x"},
    )
    return done.stdout.splitlines()


@pytest.mark.timeout(300)  # two processes that import torch, one of them beside two busy ones
def test_a_run_has_the_same_bits_on_a_busy_machine() -> None:
    """Records of two processes are equal in all but times, with neighbours and without."""
    quiet = records(0)
    assert len(quiet) == len(RUNS) * (STEPS + 2)
    with busy_neighbours(2):
        assert records(5001) == quiet


@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_a_clock_that_lies_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a simulation computes follows from what it measures of time."""
    task = ALL_LAYERS[name]
    honest = run(make(task, 40, gradients="auto"), task, steps=14)
    for clock in ("perf_counter", "monotonic", "process_time", "time"):
        monkeypatch.setattr(time, clock, Random(0).random)
    lied_to = run(make(task, 40, gradients="auto"), task, steps=14)
    assert_same(honest, lied_to, atol=0)
