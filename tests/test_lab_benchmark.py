from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.cluster.report import rows, table
from benchmarks.race.__main__ import Results
from benchmarks.race.report import Point, seconds_to
from benchmarks.race.seeds import Curve, Curves
from benchmarks.race.worker import Task as Race
from gossamer.errors import UserError
from gossamer.lab import Cluster, one_switch


def sample(method: str, round_: int, rank: int, ms: float, sent: float = 0.0) -> dict[str, Any]:
    return {
        "method": method,
        "round": round_,
        "rank": rank,
        "ms_per_step": ms,
        "bytes_per_step": sent,
        "cpu": 0.95 if method == "busy" else 0.2,
        "cpu_own": 0.05,
        "cpu_ms": 3.0,
        "peak_mb": 100.0 + rank,
    }


RACE = Race(
    methods=["ddp", "gossamer"],
    workload="stdlib-gpt",
    width=0,
    steps=4,
    most_steps=6,
    target=None,
    evaluate_every=2,
    batch=1,
    lr=1e-3,
    compute_ms=0.0,
    seed=0,
    timeout_s=1.0,
)


def test_a_race_is_to_the_loss_of_ddp() -> None:
    """A curve is there when it first is as low, between two points by a straight line."""
    curve = [Point("r", "m", i, 10.0 * i, loss) for i, loss in enumerate([3.0, 2.0, 2.5, 1.0])]
    assert seconds_to(curve, 2.5) == 5.0
    assert seconds_to(curve, 1.75) == pytest.approx(25.0)
    assert seconds_to(curve, 3.5) == 0.0
    assert seconds_to(curve, 0.5) is None


def test_a_row_is_the_median_of_the_slowest_hosts() -> None:
    """A round takes as long as its slowest host, and a method the median of its rounds."""
    samples = [
        sample("local", round_, rank, 10.0 * round_ + rank)
        for round_ in range(3)
        for rank in (0, 1)
    ]
    (row,) = rows(samples, "1gbit", 10**9)
    assert (row.ms_per_step, row.ms_lowest, row.ms_highest) == (11.0, 1.0, 21.0)
    assert (row.peak_mb, row.rounds, row.ratio_to_limit) == (101.0, 3, 1.0)
    assert row.cpu_own == pytest.approx(0.1)


def test_the_limit_is_compute_or_the_wire() -> None:
    """The ratio divides by local compute or by bytes over rate, whichever is longer."""
    samples = [
        sample("local", 0, 0, 100.0),
        sample("hidden", 0, 0, 110.0, sent=1e6),
        sample("exposed", 0, 0, 440.0, sent=25e6),
    ]
    ratios = {row.method: row.ratio_to_limit for row in rows(samples, "1gbit", 10**9)}
    assert ratios == pytest.approx({"local": 1.0, "hidden": 1.1, "exposed": 2.2})


def test_failures_and_saturated_rows_are_marked() -> None:
    """A method that failed has a row that says so, and a busy machine leaves a star."""
    samples = [
        sample("busy", 0, 0, 5.0),
        {"method": "broken", "round": 0, "rank": 0, "error": "ValueError: no"},
    ]
    busy, broken = rows(samples, "1gbit", 10**9)
    assert busy.saturated
    assert (broken.rounds, broken.error) == (0, "ValueError: no")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table([busy, broken]))
    shown = console.export_text()
    assert "5*" in shown
    assert "failed" in shown


def test_the_benchmark_measures_and_survives_a_failing_method(tmp_path: Path) -> None:
    """On three hosts the ring of decent-dp fails, is reported, and the others are measured."""
    pytest.importorskip("decent_dp", reason="decent-dp, a peer, is not installed")
    try:
        with Cluster(one_switch(1, "1gbit")):
            pass
    except UserError as error:
        pytest.skip(str(error))
    file = tmp_path / "lines.jsonl"
    options = ["--hosts", "3", "--rate", "1gbit", "--compute-ms", "6", "--params", "1e5"]
    methods = ["local", "decent_dp(ring)", "ddp"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster", *options, "--steps", "4", "--rounds", "1"]
        + ["--json", str(file)]
        + [part for method in methods for part in ("--method", method)],
        check=True,
        timeout=50,
        capture_output=True,
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found = {line["method"]: line for line in lines if line["kind"] == "row"}
    assert list(found) == methods
    assert lines[0]["kind"] == "run"
    assert found["decent_dp(ring)"]["error"].startswith("ValueError")
    assert 6.0 < found["local"]["ms_per_step"] < found["ddp"]["ms_per_step"]
    # A ring all-reduce on three hosts sends 4/3 of the gradients, in frames.
    assert found["ddp"]["bytes_per_step"] == pytest.approx(1e5 * 4 * 4 / 3 * 1.05, rel=0.1)


def test_a_race_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    """Methods that came to their end are not run again, and DDP's loss is what others race to."""
    path = tmp_path / "race.jsonl"
    results = Results(RACE, path)
    for step, loss in ((0, 5.0), (4, 3.0)):
        results.add(Point("1mbit", "ddp", step, 2.0 * step, loss))
    results.end("1mbit", "ddp")
    results.add(Point("1mbit", "gossamer", 0, 0.0, 5.0))  # and then it was killed
    left = Results(RACE, path).left_of("1mbit")
    assert (left.methods, left.target) == (["gossamer"], 3.0)
    assert Results(RACE, path).left_of("2mbit") == RACE
    assert [point.step for point in Results(RACE, path).of_ended()] == [0, 4]
    with pytest.raises(UserError, match="results of the same setting"):
        Results(replace(RACE, lr=1.0), path)


def test_a_race_over_seeds_is_at_each_methods_best_rate(tmp_path: Path) -> None:
    """The rate of the lowest loss on the tuning seed is a method's; what is in the file stays."""
    path, setting = tmp_path / "seeds.jsonl", {"steps": 4}
    curves = [
        Curve("ddp", 1e-3, 1000, [(0, 5.0), (4, 3.0)]),
        Curve("ddp", 2e-3, 1000, [(0, 5.0), (4, 2.0)]),
        Curve("ddp", 4e-3, 1000, [(0, 5.0), (4, 4.0)]),
        Curve("ddp", 2e-3, 0, [(0, 5.0), (4, 2.5)]),
        Curve("gossamer", 1e-3, 0, [(0, 5.0), (4, 3.0), (6, 2.0)]),
    ]
    head = {"kind": "run", "setting": setting}
    lines = [head, *({"kind": "curve", "curve": curve._asdict()} for curve in curves)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = Curves(path, setting)
    assert found.tuned("ddp") == 2e-3
    (reference,), (own,) = found.of("ddp", 2e-3, [0]), found.of("gossamer", 1e-3, [0])
    assert own.steps_to(reference.losses[-1][1]) == 5.0
    assert own.steps_to(1.0) == float("inf")
    lrs = {"ddp": 2e-3, "gossamer": 1e-3}
    found.train(replace(RACE, lrs=lrs), hosts=4)  # nothing is left to train
    assert len(path.read_text().splitlines()) == len(lines)
    with pytest.raises(UserError, match="curves of the setting"):
        Curves(path, {"steps": 5})
