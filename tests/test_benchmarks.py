"""Benchmarks that need neither root nor minutes run at their smallest sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks import bits, imports, noise, simulation, sizes, stability, step, stragglers
from benchmarks.soak.faults import missed_steps, seconds_until
from benchmarks.soak.job import Taken, Use, trends
from tests.page_commands import own_app

# Jobs of several processes that each import torch: a loaded machine takes its time.
pytestmark = pytest.mark.timeout(150)

# The smallest sizes that each takes.
SMALL = {
    "against": ("HEAD step --turns 1 --workers 2 --params 2e4 --steps 1 --rounds 1 --method local"),
    "adam": "--workers 2 --batch-size 1 --steps 1 --seeds 0 all_reduce shared4 smooth_mixed",
    "chunks": "--model mlp --workers 4 --seconds 0",
    "connections": "--workers 2 --topology ring --steps 1 --compute 0",
    "consensus": "--workers 4 --seeds 1 --epochs 1",
    "contention": "--workers 4 --way 1:own --neighbours 0 --rounds 1 --seconds 0.01",
    "evaluation": "--workload digits-mlp --workers 4 --steps 5",
    "frameworks": "accelerate --workers 1 --seeds 0 --length 1",
    "nanogpt": "--workers 1 --batch-size 1 --accumulation 1 --steps 1 --seeds 0 ddp_adamw",
    "nonfinite": "--parameters 20000 --repeats 1",
    "optimizer": "--millions 0.1 --rounds 1 --window 2",
    "records": "--workers 4 --intervals 1 --steps 5 --rounds 1",
    "runtime_model.paper": "simulation --trials 5",
    "simulation": "--model mlp --workers 4 --rounds 1 --processes 1",
    "sketch": "--steps 5 --seeds 1 --parameters 20000 --repeats 1",
    "step": "--workers 2 --params 2e4 --steps 2 --rounds 1 --method local --method ddp",
    "store": "--clients 2",
    "topology": "--workers 8 --repeats 1",
    "workloads": "--workload digits-mlp --workers 4 --rounds 1",
}


# Each starts processes that import torch, one after the other.
LONG = {"against", "contention", "frameworks", "nanogpt", "simulation", "sketch", "step", "store"}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Benchmarks set their number of threads; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name in LONG else []) for name in SMALL],
)
def test_a_benchmark_measures(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It finishes, and prints results, most of them as JSON lines."""
    command = typer.main.get_command(own_app(import_module(f"benchmarks.{name}")))
    command.main(SMALL[name].split(), standalone_mode=False)
    printed = capsys.readouterr().out
    assert printed
    if name != "runtime_model.paper":
        assert [line for line in printed.splitlines() if line.startswith("{") and json.loads(line)]


@pytest.mark.parametrize("window", stability.WINDOWS)
@pytest.mark.parametrize("eigenvalue", [-0.3, 0.0, 0.5])
def test_overlap_lowers_what_is_stable(window: int, eigenvalue: float) -> None:
    """To (1 + λ)/2 of that of the mean, for every window; atc, with λ of 0 and more, to nothing
    below it. Adam's is the known 2(1 + β)/(1 − β).
    """
    of_mean, overlapped = (
        stability.largest_stable(each, window, 0.9, overlaps=True) for each in (1.0, eigenvalue)
    )
    assert overlapped / of_mean == pytest.approx((1 + eigenvalue) / 2, rel=1e-3)
    if eigenvalue >= 0:
        assert stability.largest_stable(eigenvalue, window, 0.9, overlaps=False) >= of_mean
    if window == 1:
        assert of_mean == pytest.approx(2 * 1.9 / 0.1, rel=1e-3)


def test_differences_grow_where_windows_meet_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    """On the same samples workers a hundred-thousandth apart come apart under awc with a window
    of eight, and stay together without a window or without overlap.
    """
    stability.main(workers=4, batch_size=2, steps=48, lr="4e-3")
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    last = {(name, algorithm): float(row[-1]) for _, name, algorithm, *row in rows[-8:]}
    windowed = "AccumAdamW, window 8"
    together = max(last["AdamW", "atc"], last["AdamW", "awc"], last[windowed, "atc"])
    assert last[windowed, "awc"] > 30 * together


@pytest.mark.parametrize(("shared", "own", "smoothed"), [(False, 4.0, 1.0), (True, 1.0, 0.25)])
def test_noise_is_told_from_what_workers_share(shared: bool, own: float, smoothed: float) -> None:
    """Independent gradients: a worker's square is n times the mean's, smoothed it is as large.
    Gradients that vary, but equally on all workers: as large, and smoothed an nth.
    """
    moments = noise.Moments(4, (0.9, 0.999))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        grads = torch.randn(1 if shared else 4, 50, generator=generator)
        moments.observe(grads.expand(4, 50))
    assert moments.quartiles("own")[1] == pytest.approx(own, rel=0.1)
    assert moments.quartiles("smoothed")[1] == pytest.approx(smoothed, rel=0.1)
    assert moments.update("smoothed") > 0


def test_jax_comes_to_the_same_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """Both vmap and lax.map agree with our steps on every model, or --jax is an error."""
    pytest.importorskip("jax", reason="the extra jax is no part of make setup")
    options = "--workers 4 --rounds 1 --processes 1 --jax"
    typer.main.get_command(own_app(simulation)).main(options.split(), standalone_mode=False)
    *rows, least = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["model"] for row in rows] == ["mlp", "convnet", "lstm", "transformer"]
    assert least["least_speed_to_jax"] == min(row["speed_to_jax"] for row in rows)


def test_jax_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks.simulation --jax says what to install, before it measures anything."""
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(typer.BadParameter, match=r"needs jax.*pip install 'gossamer\[jax\]'"):
        simulation.main(jax=True)


def test_an_import_takes_no_longer_than_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By benchmarks.imports, `import gossamer` is within the goal, 1.2 of torch's time.

    Names load what they need when used; docs/limits.md says how long that takes.
    """
    monkeypatch.setattr(imports, "IMPORTS", ("import torch", "import gossamer"))
    monkeypatch.setattr(imports, "COMMANDS", ())
    imports.main(rounds=1)
    _, own = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert own["ratio_to_torch"] <= 1.2


def test_workers_that_take_too_long_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks.step leaves no process behind when it gives up."""
    started: list[subprocess.Popen[str]] = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            started.append(self)

    monkeypatch.setattr(step, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(subprocess.TimeoutExpired):
        step.main(workers=2, params=2e4, steps=2, rounds=1, method=["local"])
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


ONE = '''"""Two functions, one in the other."""


def outer() -> None:
    """Do nothing."""

    def inner() -> None:
        pass
'''
TWO = """class Some:
    async def method(
        self,
    ) -> None: ...
"""


def test_sizes_are_the_lines_that_an_editor_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of modules as `wc -l` counts; of functions from def to the last line, nested ones too."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "one.py").write_text(ONE)
    (tmp_path / "deep" / "two.py").write_text(TWO)
    (tmp_path / "notes.txt").write_text("no module")
    for path in ("one.py", "deep/two.py"):
        command = ["wc", "-l", str(tmp_path / path)]
        counted = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert sizes.modules(tmp_path)[path] == int(counted.split()[0])
    assert sizes.functions(tmp_path) == {
        "one.py:4 outer": 5,
        "one.py:7 inner": 2,
        "deep/two.py:2 method": 3,
    }
    monkeypatch.setattr(sizes.modules, "__defaults__", (tmp_path,))
    monkeypatch.setattr(sizes.functions, "__defaults__", (tmp_path,))
    sizes.main()
    assert capsys.readouterr().out.splitlines() == [
        "modules: 2, median 6 lines, 90 % within 7.6, longest 8 (one.py)",
        "functions: 3, median 3 lines, 90 % within 4.6, longest 5 (one.py:4 outer)",
    ]


def test_bits_tell_runs_apart_and_repeat_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repeated case prints the same line; another order or another step prints another one."""

    def lines(order: str, num_steps: int) -> list[str]:
        monkeypatch.setattr(bits, "NUM_STEPS", num_steps)
        cases = [("a case", bits._simulate(bits.TASKS["mlp"], topology="ring", order=order))]
        monkeypatch.setattr(bits, "_simulations", lambda: iter(cases))
        bits.main()
        return capsys.readouterr().out.splitlines()

    for other in ("_ranks", "_records"):
        monkeypatch.setattr(bits, other, lambda: iter(()))
    first = lines("awc", 3)
    assert first == lines("awc", 3)
    assert len({*first, *lines("atc", 3), *lines("awc", 4)}) == 3


def test_of_a_soak_it_is_told_what_was_lost_and_what_grows() -> None:
    """Steps of a worker that came back, seconds until others went on, and a leak's slope."""
    all_three, two = (0, 1, 2), (0, 2)
    hit = [Taken(10.0, 5, all_three), Taken(14.0, 9, all_three), Taken(14.1, 10, all_three)]
    other = [Taken(10.0, 5, all_three), Taken(10.2, 6, all_three), Taken(10.7, 7, two)]
    assert missed_steps(hit, at=10.1) == 3
    assert missed_steps(other, at=10.1) == 0
    assert seconds_until(other, [1], at=10.1) == pytest.approx(0.6)
    assert seconds_until(hit, [1], at=10.1) == float("inf")
    uses = [Use(60.0 * minute, 100 + minute, 40, 12) for minute in range(10)]
    found = trends(uses, since=120)
    assert found["rss_mb"] == pytest.approx((102, 109, 60))
    assert found["descriptors"] == pytest.approx((40, 40, 0))


def test_one_slow_host_sets_the_pace_of_those_who_do_not_wait_for_it() -> None:
    """In the model all take as many steps, so what skipping saves is for others to wait later."""
    waits = stragglers.Setting(num_workers=8, message=0.5, slow=2.0)
    skips = stragglers.Setting(num_workers=8, message=0.5, slow=2.0, most_skipped=10**6)
    assert stragglers.play(waits)[0] == pytest.approx(stragglers.play(skips)[0], rel=1e-3)
    even = stragglers.Setting(num_workers=8, message=0.0)
    assert 1 < stragglers.play(even)[0] < 1.03
