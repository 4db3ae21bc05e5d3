"""Runs of an experiment that are killed and resume from their checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gossamer.bench import Store, expand, run_experiment
from gossamer.bench.experiment import Experiment, parse
from gossamer.bench.runner import Listener
from gossamer.engine import Checkpointing, RunSpec, run
from gossamer.records import Ended, Evaluation, Norms, Record, Started, Step
from tests.processes import descendants, is_there

pytestmark = pytest.mark.timeout(200)

EVERY_S = 0.05

LONG = """
name = "long"
workload = "digits-mlp"
workers = 4
methods = ["D_ring"]
run = { epochs = 8, steps_per_epoch = 40, log_every = 10, dtype = "float64" }
"""


class Quiet(Listener):
    """Listens to the progress of a run, and may kill its process."""

    def __init__(self, store: Store, kill_after: int) -> None:
        self._store = store
        self._kill_after = kill_after
        self.steps: list[int] = []

    def planned(self, runs: Sequence[RunSpec], done: int) -> None:  # noqa: D102
        pass

    def started(self, spec: RunSpec) -> None:  # noqa: D102
        pass

    def advanced(self, spec: RunSpec, step: int) -> None:  # noqa: D102
        self.steps.append(step)
        if step >= self._kill_after and checkpoint(self._store, spec):
            for part in (self._store.folder / "runs").glob(f"{spec.id}.*.part"):
                os.kill(int(part.name.split(".")[1]), signal.SIGKILL)

    def ended(self, spec: RunSpec, ended: Ended, metric: float | None) -> None:  # noqa: D102
        pass


def checkpoint(store: Store, spec: RunSpec) -> int:
    return Checkpointing(store.checkpoint_folder(spec.id)).step or 0


def killed_runner(experiment: Experiment, file: Path, store: Store, spec: RunSpec) -> float:
    """Kill a runner after a checkpoint; return how long its children survive."""
    options = ["--out", str(store.folder), "--jobs", "1", "--checkpoint-every", str(EVERY_S)]
    command = [sys.executable, "-m", "gossamer", "bench", "run", str(file), *options]
    runner = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not checkpoint(store, spec):
        assert runner.poll() is None
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    started = descendants(runner.pid)
    assert started
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    killed = time.monotonic()
    while any(map(is_there, started)) and time.monotonic() < killed + 30:
        time.sleep(0.01)
    return time.monotonic() - killed


def assert_alike(story: Sequence[Record], whole: Sequence[Record]) -> None:
    """Except for times; sums of a simulation agree up to rounding."""
    assert [record.kind for record in story] == [record.kind for record in whole]
    for ours, theirs in zip(story, whole, strict=True):
        if isinstance(ours, Step) and isinstance(theirs, Step):
            assert (ours.step, ours.lr, ours.bytes_sent) == (
                theirs.step,
                theirs.lr,
                theirs.bytes_sent,
            )
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
        elif isinstance(ours, Evaluation) and isinstance(theirs, Evaluation):
            assert (ours.step, ours.average) == (theirs.step, theirs.average)


def test_a_run_survives_the_kill_of_its_runner_and_its_own(tmp_path: Path) -> None:
    """Its records and norms are those of a run that nobody killed; checkpoints go with its end.

    What a killed runner had started ends with it. A killed run is an error as before, and goes on
    when it is tried again.
    """
    file, store = tmp_path / "long.toml", Store(tmp_path / "out")
    file.write_text(LONG)
    experiment = parse(LONG, "long.toml")
    (spec,) = expand(experiment).runs
    assert killed_runner(experiment, file, store, spec) < 5  # below one on a machine that is free
    saved = checkpoint(store, spec)
    assert saved
    again = Quiet(store, kill_after=saved + 10)
    run_experiment(experiment, store, again, checkpoint_s=EVERY_S)
    ended = store.ended(spec.id)
    assert ended is not None
    assert ended.status == "error"
    assert checkpoint(store, spec) >= saved
    run_experiment(experiment, store, Quiet(store, 10**9), retry=True, checkpoint_s=EVERY_S)
    story = store.read(spec.id)
    assert story.ended is not None
    assert story.ended.status == "done"
    assert not store.checkpoint_folder(spec.id).exists()
    assert sum(isinstance(record, Started) for record in story.records) == 1
    whole = list(run(spec, norms_mb=experiment.norms_mb))
    assert_alike(story.records, [record for record in whole if not isinstance(record, Norms)])
    assert_same_norms(store, spec, [record for record in whole if isinstance(record, Norms)])


def assert_same_norms(store: Store, spec: RunSpec, whole: Sequence[Norms]) -> None:
    """Norms from before a kill are present, each step once."""
    table = store.norms(spec.id)
    assert table is not None
    assert table["step"].unique(maintain_order=True).to_list() == [norms.step for norms in whole]
    expected = [norm for norms in whole for of_tensor in norms.norms for norm in of_tensor]
    assert table["norm"].to_list() == pytest.approx(expected, rel=1e-9)
    assert not list((store.folder / "norms").glob("*.part"))


def test_what_no_run_goes_on_from_is_removed(tmp_path: Path) -> None:
    """A new runner only keeps checkpoints of runs that are pending or may be retried."""
    store, experiment = Store(tmp_path), parse(LONG.replace("epochs = 8", "epochs = 1"), "x.toml")
    (spec,) = expand(experiment).runs
    for run_id in ("of-another-experiment", spec.id):
        (store.checkpoint_folder(run_id) / "step-00000001").mkdir(parents=True)
    with store.locked(""):
        store.drop_checkpoints([spec.id])
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [spec.id]
        store.drop_checkpoint(spec.id)
    assert not (tmp_path / "checkpoints").exists()
