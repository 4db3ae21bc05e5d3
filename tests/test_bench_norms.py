"""Raw norms: which steps, how many, and atomic files."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from gossamer import Simulation
from gossamer.bench import Store
from gossamer.bench.experiment import parse
from gossamer.bench.matrix import expand
from gossamer.bench.norms import NormsPart, affordable, read_norms
from gossamer.bench.recording import record_run
from gossamer.bench.report.writing import write_report
from gossamer.bench.store import StoreError
from gossamer.consensus import NormSteps, dispersion, tensor_norms
from gossamer.engine import RunSpec, run
from gossamer.engine.kept_norms import interval
from gossamer.errors import UserError
from gossamer.records import Norms, Started, Step
from gossamer.topology import parse as parse_topology
from gossamer.topology import spaced

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def spec_of(**fields: Any) -> RunSpec:
    usual: dict[str, Any] = {
        "workload": "digits-mlp",
        "workers": 4,
        "topology": "ring",
        "order": "atc",
        "epochs": 1,
        "steps_per_epoch": 20,
        "log_every": 5,
        "evaluate_replicas": 0,
    }
    return RunSpec.model_validate(usual | fields)


def norms_of(step: int, workers: int = 3) -> Norms:
    values = np.random.default_rng(step).random((2, workers)).tolist()
    return Norms(step=step, every=5, tensors=["a", "b"], norms=values)


def recorded(folder: Path, spec: RunSpec, norms_mb: float = 50) -> Store:
    store = Store(folder)
    with store.locked(""):
        outcome = record_run(store, spec.id, partial(run, spec, norms_mb=norms_mb), print)
    assert outcome.ended.status == "done", outcome.ended.reason
    return store


# - Of which steps


@pytest.mark.parametrize(
    ("topology", "overlaps", "exchange_every", "every", "expected"),
    [
        ("ring", False, 1, 5, [5, 10, 15, 20]),
        ("random_matching", True, 1, 5, [5, 10, 15, 20]),
        ("complete", False, 4, 5, [4, 8, 12, 20]),
        ("complete", True, 4, 5, [3, 7, 15, 19]),  # mixed by the round that comes next
        ("complete", False, 8, 5, [8, 16]),
        ("ring", False, 4, 10, [8, 20]),
        ("complete", False, 40, 5, []),
        ("ring", False, 1, 0, []),
    ],
)
def test_norms_are_of_the_last_step_that_is_mixed(
    topology: str, overlaps: bool, exchange_every: int, every: int, expected: list[int]
) -> None:
    """The last one of each interval: under local SGD the step just before an average, or none."""
    schedule = spaced(parse_topology(topology, 4), exchange_every)
    steps = NormSteps(schedule, overlaps, every)
    assert [step + 1 for step in range(20) if step in steps] == expected


def test_one_worker_has_norms_at_every_interval() -> None:
    """It has no peer; its norms are those of the last step."""
    steps = NormSteps(parse_topology("ring", 1), False, 5)
    assert [step + 1 for step in range(10) if step in steps] == [5, 10]


def make_local_sgd() -> Simulation:
    return Simulation(
        nn.Linear(3, 2),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        4,
        "complete",
        "atc",
        every=4,
        norms_every=5,
    )


def test_norms_of_local_sgd_are_before_the_average() -> None:
    """The measured norms differ between workers, their parameters after that step do not."""
    sim = make_local_sgd()
    inputs, targets = torch.randn(5, 4, 6, 3), torch.randn(5, 4, 6, 2)
    for step in range(4):
        sim.step(inputs[step], targets[step])
    assert sim.norms_step == 4
    assert sim.last_norms is not None
    assert dispersion(sim.last_norms).gini.min() > 1e-3
    assert dispersion(tensor_norms([*sim.parameters.values()])).gini.max() < 1e-6
    # What a record of step 5 needs was measured at step 4: it is part of the state.
    again = make_local_sgd()
    again.load_state_dict(sim.state_dict())
    again.step(inputs[4], targets[4])
    assert again.norms_step == 4
    np.testing.assert_array_equal(again.last_norms, sim.last_norms)


# - How many


def test_the_interval_follows_from_the_bound() -> None:
    """It is log_every if all norms fit; a longer run stores a subset within the budget."""
    small, wide = spec_of(), spec_of(workers=1000, epochs=5000, steps_per_epoch=1000)
    assert interval(small, 4, 50) == 5
    for tensors in (4, 161):
        every = interval(wide, tensors, 50)
        assert every % wide.log_every == 0
        kept = wide.num_steps // every
        assert 0 < kept * tensors * wide.workers * 8 <= 50e6
        # One interval less would be too much, also by a generous estimate.
        assert wide.num_steps // (every - wide.log_every) * tensors * wide.workers * 10 > 50e6
    assert interval(wide, 161, 50) > interval(wide, 4, 50) > wide.log_every
    assert interval(wide, 4000, 50) == wide.num_steps  # one step fits
    assert interval(wide, 6000, 50) == interval(small, 4, 0) == 0  # not even one step fits


def test_a_file_is_not_larger_than_its_bound(tmp_path: Path) -> None:
    """The file is within the budget, for small budgets and for incompressible norms."""
    for bound_mb in (0.05, 1):
        spec = spec_of(workers=64, steps_per_epoch=100_000, log_every=1)
        every = interval(spec, 2, bound_mb)
        part = NormsPart(tmp_path / "a.1.part")
        for step in range(every, spec.num_steps + 1, every):
            part.write(norms_of(step, 64))
        part.finish(tmp_path / "a.parquet")
        assert 0.5 * bound_mb * 1e6 < (tmp_path / "a.parquet").stat().st_size <= bound_mb * 1e6


def test_no_part_of_an_id() -> None:
    """The budget for norms does not affect training."""
    text = 'name = "x"\nworkload = "digits-mlp"\nworkers = 4\nmethods = "D_ring"\n'
    (usual,), (none,) = (
        expand(parse(text + more, "x.toml")).runs for more in ("", "norms_mb = 0\n")
    )
    assert usual.id == none.id
    with pytest.raises(UserError, match="norms_mb"):
        parse(text + "norms_mb = -1\n", "x.toml")


# - What they say


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"order": "awc"},
        {"topology": "complete", "every": 4},
        {"topology": "complete", "every": 3, "outer_lr": 0.7},
    ],
)
def test_every_dispersion_can_be_computed_again(tmp_path: Path, fields: dict[str, Any]) -> None:
    """The measures of what is in the file are those of the records, bit for bit, of the same steps.

    Under local SGD and DiLoCo these are averaged.
    """
    spec = spec_of(**fields)
    store = recorded(tmp_path, spec)
    norms, records = store.norms(spec.id), store.read(spec.id).records
    assert norms is not None
    assert norms.columns == ["step", "tensor", "worker", "norm"]
    assert isinstance(records[0], Started)
    assert records[0].norms_every == spec.log_every
    steps = {r.dispersion_step: r for r in records if isinstance(r, Step)}
    assert norms["step"].unique().sort().to_list() == sorted(step for step in steps if step)
    for step in norms["step"].unique():
        rows = norms.filter(step=step)
        assert rows["worker"].to_list() == [*range(4)] * 4
        assert rows["tensor"].unique(maintain_order=True).to_list() == NAMES
        measures = dispersion(rows["norm"].to_numpy().reshape(4, 4))
        assert [*zip(*measures, strict=True)] == [*steps[step].dispersion.values()]
        assert step % spec.every == 0


def test_centralized_training_has_none(tmp_path: Path) -> None:
    """Its workers share one model; a run with a budget of 0 has none either."""
    for spec, norms_mb in ((spec_of(topology="centralized"), 50), (spec_of(), 0)):
        store = recorded(tmp_path / str(norms_mb), spec, norms_mb)
        assert store.norms(spec.id) is None
        started = store.read(spec.id).records[0]
        assert isinstance(started, Started)
        assert started.norms_every == 0
        assert not (store.folder / "norms").exists()


def test_the_report_reads_them(tmp_path: Path) -> None:
    """A figure, and a table with quantiles over workers; a damaged file is left out."""
    spec = spec_of()
    store = recorded(tmp_path, spec)
    results = write_report(tmp_path, tables_dir=tmp_path / "tables")
    assert 'data-figure="norms"' in (tmp_path / "report.html").read_text()
    table = pl.read_parquet(tmp_path / "tables" / "norms.parquet")
    assert table.equals(results.norms)
    norms = store.norms(spec.id)
    assert norms is not None
    row = table.row(by_predicate=(pl.col("step") == 10) & (pl.col("tensor") == NAMES[2]))
    values = norms.filter(step=10, tensor=NAMES[2])["norm"].to_numpy()
    assert row == (spec.id, 10, NAMES[2], *np.quantile(values, [0, 0.25, 0.5, 0.75, 1]))
    store.norms_path(spec.id).write_bytes(b"PAR1")
    with pytest.raises(UserError, match="must be a parquet file"):
        store.norms(spec.id)
    assert write_report(tmp_path).norms.is_empty()


# - A file that is there entirely, or not at all


def test_a_file_that_is_cut_back_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Truncated to a step, without later steps or an incomplete block; also to none."""
    part = NormsPart(tmp_path / "n" / "a.1.part")
    for step in (5, 10, 15, 20):
        part.write(norms_of(step))
    part.close()
    whole = (tmp_path / "n" / "a.1.part").read_bytes()
    for step, cut in ((12, 0), (10, 30), (20, 0), (15, 3), (0, 0)):
        path = tmp_path / "n" / f"b{step}.2.part"
        path.write_bytes(whole[: len(whole) - cut])
        again = NormsPart(path)
        again.cut(step)
        for later in range(5 * (step // 5 + 1), 21, 5):
            again.write(norms_of(later))
        again.close()
        assert path.read_bytes() == whole
    part.finish(tmp_path / "n" / "a.parquet")
    assert read_norms(tmp_path / "n" / "a.parquet")["step"].to_list() == sorted([5, 10, 15, 20] * 6)
    assert pl.read_parquet_metadata(tmp_path / "n" / "a.parquet")["norms_every"] == "5"
    assert not (tmp_path / "n" / "a.1.part").exists()
    # Where a header was not written to its end, or nothing was, there is nothing to go on from.
    torn = NormsPart(tmp_path / "n" / "c.3.part")
    (tmp_path / "n" / "c.3.part").write_bytes(whole[:10])
    torn.cut(10)
    torn.finish(tmp_path / "n" / "c.parquet")
    assert not (tmp_path / "n" / "c.parquet").exists()


def test_a_kill_leaves_nothing_that_is_taken_for_norms(tmp_path: Path) -> None:
    """A kill while the file is written: neither run nor norms exist, and the rest is removed."""
    command = [sys.executable, "-m", "tests.killed_while_writing_norms", str(tmp_path)]
    ended = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGKILL
    left = sorted(path.suffix for path in (tmp_path / "norms").iterdir())
    assert left == [".part", ".part"]
    store = Store(tmp_path)
    assert store.norms("a") is None
    assert store.ended("a") is None
    with store.locked(""):
        assert not [*(tmp_path / "norms").iterdir()]


def test_norms_of_a_run_without_an_end_do_not_count(tmp_path: Path) -> None:
    """A kill between the two renames leaves only norms; the next attempt removes them."""
    spec = spec_of()
    store = recorded(tmp_path, spec)
    (tmp_path / "runs" / f"{spec.id}.jsonl").unlink()
    assert store.norms(spec.id) is None
    recorded(tmp_path, spec, norms_mb=0)
    assert not store.norms_path(spec.id).exists()


def test_norms_follow_a_run_that_is_set_aside(tmp_path: Path) -> None:
    """They are kept with its records under the same number; a run whose process died has none."""
    spec = spec_of()
    store = recorded(tmp_path, spec)
    store.set_aside(spec.id)
    assert store.norms(spec.id) is None
    assert len(read_norms(tmp_path / "failures" / f"{spec.id}.1.parquet")) == 4 * 4 * 4


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system needs root")
def test_a_disk_without_room_for_norms_is_no_end_of_a_run(tmp_path: Path) -> None:
    """Whether the temporary or the parquet file does not fit: one error, and no recorded run."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "none", str(mount)], check=True)
    try:
        for steps in (10, 20):
            store = Store(mount)
            records = [norms_of(5 * step, 3000) for step in range(1, steps + 1)]
            with store.locked(""), pytest.raises(StoreError, match="No space left on device"):
                record_run(store, "a", partial(iter, records), print)
            assert store.ended("a") is None
            assert not store.norms_path("a").exists()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_without_polars_runs_keep_no_norms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs work without them, and a warning says what to install."""

    def found(name: str) -> None:
        return None if name == "polars" else pytest.fail(name)

    assert affordable(50) == 50
    monkeypatch.setattr("gossamer.bench.norms.find_spec", found)
    with caplog.at_level(logging.WARNING):
        assert affordable(50) == affordable(0) == 0
    assert caplog.text.count("pip install 'gossamer[bench]'") == 1
