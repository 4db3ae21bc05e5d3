"""The code under test for each kind of input, which must accept it or raise a readable error."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks.fuzz import inputs
from gossamer.bench import expand
from gossamer.bench.analysis.tabulate import tabulate
from gossamer.bench.experiment import parse as parse_experiment
from gossamer.bench.store import Store
from gossamer.cli import app
from gossamer.errors import UserError
from gossamer.files import write_atomic
from gossamer.gossip.checkpoint_folder import CheckpointFolder
from gossamer.gossip.snapshot import DamagedError, checksum_of
from gossamer.lab.layout import one_switch, parse_layout
from gossamer.rates import format_rate, parse_rate
from gossamer.records import Ended, Started
from gossamer.runtime_model import Job, build, predict
from gossamer.runtime_model.model import Trials
from gossamer.runtime_model.profile import read_profile
from gossamer.topology import parse
from gossamer.topology.summary import summarize

REFUSALS = (UserError, DamagedError)
"""Errors that a user reads in one line; for checkpoints, errors that make restore() skip one."""

_FEW_WORKERS = 64


class Kind(NamedTuple):
    """One kind of input."""

    strategy: SearchStrategy[Any]
    use: Callable[[Any, Path], Any]
    """Takes an input and an empty folder; raises one of REFUSALS, or returns."""

    share: int
    """Share of this kind in a hundred inputs."""


def use_topology(given: tuple[str, int], folder: Path) -> None:
    """Build a topology, and analyse a small one."""
    text, workers = given
    schedule = parse(text, workers)
    if workers <= _FEW_WORKERS:
        for step in range(3):
            assert schedule.round(step).num_workers == workers
        summarize(schedule)


def use_rate(text: str, folder: Path) -> None:
    """Parse a rate; its formatted form parses to nearly the same."""
    bits_s = parse_rate(text)
    assert math.isclose(parse_rate(format_rate(bits_s)), bits_s, rel_tol=1e-3)


def use_layout(given: str | tuple[int, str], folder: Path) -> None:
    """Parse a layout of nodes, or of one switch."""
    layout = parse_layout(given) if isinstance(given, str) else one_switch(*given)
    assert 1 <= len(layout.hosts) <= 250


def use_experiment(text: str, folder: Path) -> None:
    """Parse an experiment, and expand a small one."""
    experiment = parse_experiment(text, "x.toml", folder)
    assert (folder / experiment.name).parent == folder
    if sum(block.num_points for block in experiment.blocks) <= _FEW_WORKERS:
        for spec in expand(experiment).runs:
            assert spec.id


def use_profile(content: bytes, folder: Path) -> None:
    """Read a profile and predict from it."""
    (folder / "profile.json").write_bytes(content)
    profile = read_profile(folder / "profile.json")
    if len(profile.buckets) > _FEW_WORKERS:
        return
    job = Job.of(profile, 4)
    for method in ("ddp", "one_peer_ring"):
        trials = Trials(draw=job.trials().draw, iterations=3, warmup=1)
        assert 0 < predict(build(method, job), trials).mean_s < math.inf


def use_story(content: bytes, folder: Path) -> None:
    """Read a run's file as a report does, beside an intact one."""
    (folder / "runs").mkdir()
    (folder / "runs" / "a.jsonl").write_bytes(content)
    store = Store(folder)
    store.started("a")
    store.ended("a")
    assert len(tabulate(store.stories()).runs) <= 1


def use_manifest(content: bytes, folder: Path) -> None:
    """Read a checkpoint with an arbitrary manifest."""
    checkpoints = CheckpointFolder(folder, 0)
    checkpoints.of(1).mkdir()
    (checkpoints.of(1) / "checkpoint.json").write_bytes(content)
    assert checkpoints.complete_steps() == [1]
    _read_checkpoint(checkpoints)


def use_structure(structure: Any, folder: Path) -> None:
    """Read a checkpoint with an arbitrary part that has the right checksum."""
    checkpoints = CheckpointFolder(folder, 0)
    checkpoints.of(1).mkdir()
    part = checkpoints.of(1) / "part"
    text = json.dumps(structure).encode() or b" "
    tensors = {
        "a": torch.zeros(3),
        "b": torch.zeros(2, 2),
        "structure.json": torch.frombuffer(bytearray(text), dtype=torch.uint8),
    }
    save_file(tensors, part)
    checksum = checksum_of(part)
    part.rename(checkpoints.of(1) / f"rank-00000-{checksum:015x}.safetensors")
    checkpoints.write_manifest(1, [checksum])
    _read_checkpoint(checkpoints)


def _read_checkpoint(checkpoints: CheckpointFolder) -> None:
    try:
        found = checkpoints.read(1, 1)
    except OSError as error:
        raise DamagedError(str(error)) from error
    assert isinstance(found.state, dict)


_arguments = st.one_of(
    st.builds(
        lambda given, rounds, params: [
            *("topology", given[0], "-n", str(given[1])),
            *("--rounds", str(rounds), "--params", str(params), "--json"),
        ],
        *(inputs.topologies, st.integers(-1, 5), inputs.floats),
    ),
    st.builds(lambda rate: ["profile", "--gpu", "a100", "--link", rate], inputs.rates),
    st.builds(
        lambda params, flops: [
            *("profile", "--gpu", "t4", "--params", str(params), "--flops", str(flops)),
        ],
        *(inputs.floats, inputs.floats),
    ),
    st.builds(lambda workers: ["plan", "profile.json", "--workers", workers], inputs.words),
    st.builds(
        lambda hosts, rate: ["lab", "--hosts", str(hosts), "--rate", rate, "--", "/none"],
        *(inputs.integers, inputs.rates),
    ),
    st.builds(lambda layout: ["lab", "--layout", layout, "--", "/none"], inputs.layouts),
)


def use_arguments(arguments: list[str], folder: Path) -> None:
    """Run the command line with arguments; its --json output must be JSON."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    finally:
        os.chdir(before)
    assert result.exit_code in (0, 1, 2)
    if "--json" in arguments and result.exit_code == 0:
        for line in result.stdout.splitlines():
            json.loads(line, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def use_writes(given: tuple[str, int, bool], folder: Path) -> None:
    """Write files while some disk call fails: each must be new, unchanged or absent."""
    text, fail_at, had_one = given
    path = folder / "file.json"
    if had_one:
        path.write_text("old")
    calls = 0

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*args, **kwargs)

        return run

    started = Started(run_id="a", spec={}, environment={"text": text})
    store = Store(folder / "x")
    patched = [
        mock.patch.object(Path, name, failing(getattr(Path, name)))
        for name in ("write_text", "replace", "mkdir")
    ]
    patched += [mock.patch.object(os, "fsync", failing(os.fsync))]
    for patch in patched:
        patch.start()
    try:
        write_atomic(path, lambda aside: aside.write_text(text))
        with store.locked(text), store.writing("a") as write:
            write(started)
            write(Ended(status="done"))
    finally:
        for patch in patched:
            patch.stop()
        assert {each.name for each in folder.iterdir()} <= {"file.json", "x"}
        assert [*store.folder.glob("*.part")] == []
        written = path.read_bytes() if path.exists() else None
        assert written in (text.encode(), b"old" if had_one else None)
        if store.ended("a") is not None:
            assert store.read("a").records == [started, Ended(status="done")]


KINDS: dict[str, Kind] = {
    "rates": Kind(inputs.rates, use_rate, 22),
    "layouts": Kind(st.one_of(inputs.layouts, inputs.switches), use_layout, 15),
    "topologies": Kind(inputs.topologies, use_topology, 18),
    "experiments": Kind(inputs.experiments, use_experiment, 10),
    "profiles": Kind(inputs.profiles, use_profile, 12),
    "records": Kind(inputs.stories(), use_story, 8),
    "manifests": Kind(inputs.manifests, use_manifest, 8),
    "states": Kind(inputs.structures, use_structure, 4),
    "arguments": Kind(_arguments, use_arguments, 1),
    "writes": Kind(st.tuples(inputs.words, st.integers(0, 16), st.booleans()), use_writes, 2),
}
