"""An interrupted run resumes from its checkpoint, with the records of an uninterrupted one."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gossamer import records
from gossamer.engine import Checkpointing, RunSpec, run
from gossamer.engine.checkpoints import RunCheckpoints
from gossamer.engine.distributed import train_rank
from gossamer.gossip import snapshot
from gossamer.records import Ended, Evaluation, Record, Started, Step
from tests.pool import ProcessPool

ALWAYS = 1e-9
"""Seconds between two checkpoints: every step makes one."""

OPTIONS = [
    {"topology": "ring"},
    {"topology": "one_peer_exponential", "order": "atc", "optimizer": "adamw"},
    {"topology": "centralized", "optimizer": "sgd(momentum=0.9)"},
    {"topology": "ring", "control": "adaptive(s=0.05)"},
    {"topology": "ring", "control": "auto", "order": "atc"},
    {"topology": "complete", "every": 3, "order": "atc", "outer_lr": 0.7},
    {"topology": "ring", "workload": "digits-cnn", "max_bytes": 3e6},
]


def spec(**options: object) -> RunSpec:
    usual = {"workload": "digits-mlp", "workers": 4, "epochs": 2, "steps_per_epoch": 7}
    return RunSpec.model_validate({**usual, "log_every": 3, "dtype": "float32", **options})


def timeless(story: Iterable[Record]) -> list[Record]:
    """Return records without what may differ when a run is repeated."""
    return [
        record.model_copy(update={"train_s": 0.0})
        if isinstance(record, Step | Evaluation | Ended)
        else record
        for record in story
    ]


def cut(story: Iterable[Record], num_records: int) -> list[Record]:
    """Take so many records of a run, and never ask for the next."""
    return list(itertools.islice(story, num_records))


def whole_on_rank(text: str) -> list[str]:
    return [records.to_line(record) for record in train_rank(RunSpec.model_validate_json(text))]


def cut_on_rank(text: str, folder: str, cuts: list[int]) -> list[str]:
    """Train as one rank of a pool, cut off after these steps."""
    given, where = RunSpec.model_validate_json(text), Checkpointing(Path(folder), ALWAYS)
    for last in cuts:
        for record in train_rank(given, checkpointing=where):
            if isinstance(record, Step) and record.step == last:
                break
    return [records.to_line(record) for record in train_rank(given, checkpointing=where)]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_simulated_run_goes_on_bit_for_bit(options: dict[str, object], tmp_path: Path) -> None:
    """Interrupted after any of its records, repeatedly, it yields those of an uninterrupted run."""
    whole = timeless(run(spec(**options)))
    where = Checkpointing(tmp_path / "checkpoint", ALWAYS)
    for num_records in (2, 5, 7):
        before = cut(run(spec(**options), checkpointing=where), num_records)
        assert timeless(before) == whole[:num_records]
    assert timeless(run(spec(**options), checkpointing=where)) == whole


@pytest.mark.parametrize("options", [OPTIONS[i] for i in (0, 2, 3, 5)])
def test_a_run_on_ranks_goes_on_bit_for_bit(
    options: dict[str, object], tmp_path: Path, pool: ProcessPool
) -> None:
    """The same on processes, each with a state of its own, under DDP and under gossip."""
    text = spec(**options).model_dump_json()
    whole = map(records.from_line, pool.run(whole_on_rank, text)[0])
    lines = pool.run(cut_on_rank, text, str(tmp_path), [3, 9])[0]
    assert timeless(map(records.from_line, lines)) == timeless(whole)


def test_time_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """What was spent before the cut counts, once; there is one start, and steps come in order."""
    where = Checkpointing(tmp_path, ALWAYS)
    before = cut(run(spec(), checkpointing=where), 5)
    story = list(run(spec(), checkpointing=where))
    assert story[:4] == before[:4]
    assert sum(isinstance(record, Started) for record in story) == 1
    times = [record.train_s for record in story if isinstance(record, Step | Evaluation)]
    assert times == sorted(times)


class Pretended:
    """A clock and workers that do nothing."""

    rank = step = 0

    def __init__(self) -> None:
        self.asked = 0

    def gather(self, value: int) -> list[int]:  # noqa: D102
        return [value]

    def slowest(self, seconds: float) -> float:  # noqa: D102
        self.asked += 1
        return seconds

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        pass


def test_the_interval_decides_when_a_checkpoint_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never later than it, and little earlier; to know when, processes rarely wait for each other.

    Steps take a tenth of a second in the first half of the run, and a hundredth in the second.
    """
    now = 0.0
    monkeypatch.setattr("gossamer.engine.checkpoints.time.monotonic", lambda: now)
    run = Pretended()
    checkpoints = RunCheckpoints("a", run, run, Checkpointing(tmp_path, 60.0))
    saved: list[float] = [0.0]
    monkeypatch.setattr(RunCheckpoints, "_save", lambda self, step: saved.append(now))  # pyright: ignore
    for run.step in range(1, 20_000):
        now += 0.1 if run.step < 10_000 else 0.01
        checkpoints.save_where_due()
    gaps = [later - sooner for sooner, later in itertools.pairwise(saved)]
    assert len(gaps) > 16
    assert 58 < min(gaps) <= max(gaps) <= 60
    assert run.asked < 25 * len(gaps)


def test_a_folder_holds_one_checkpoint(tmp_path: Path) -> None:
    """However many were made, and whatever a killed process has left half-written."""
    where = Checkpointing(tmp_path, ALWAYS)
    cut(run(spec(), checkpointing=where), 3)
    (tmp_path / "step-00000012").mkdir()
    (tmp_path / "step-00000012" / "rank-00000.part").write_text("half")
    cut(run(spec(), checkpointing=where), 4)
    assert len(list(tmp_path.glob("step-*"))) == 1
    assert len(list(tmp_path.glob("step-*/*"))) == 2  # a state and a manifest


def damage(folder: Path) -> None:
    (part,) = folder.glob("step-*/*.safetensors")
    part.write_bytes(part.read_bytes()[:-1] + b"?")


def change(folder: Path, name: str, value: object) -> None:
    (part,) = folder.glob("step-*/*.safetensors")
    manifest = part.with_name("checkpoint.json")
    state = snapshot.read(part, int(part.stem.split("-")[-1], 16))
    text = manifest.read_text().replace(
        part.stem.split("-")[-1], f"{snapshot.write(part, state | {name: value}):015x}"
    )
    manifest.write_text(text)
    part.rename(part.with_stem(f"rank-00000-{snapshot.checksum_of(part):015x}"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage, "which is damaged: .* must have the checksum"),
        (partial(change, name="version", value=99), "whose version is 99 and not 2"),
        (partial(change, name="torch", value="0.1"), r"whose torch is 0\.1 and not"),
        (partial(change, name="run_id", value="x"), "whose run_id is x and not"),
    ],
)
def test_what_cannot_be_used_is_passed_over(
    spoil: Callable[[Path], object], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged checkpoint, or one of another run or version: it is logged, the run is complete."""
    where = Checkpointing(tmp_path, ALWAYS)
    cut(run(spec(), checkpointing=where), 3)
    spoil(tmp_path)
    with caplog.at_level(logging.INFO):
        story = list(run(spec(), checkpointing=where))
    assert timeless(story) == timeless(run(spec()))
    assert "goes on from step" not in caplog.text
    assert re.search(f"passing over .*{reason}", caplog.text)


def test_a_checkpoint_that_cannot_be_written_is_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run logs it and continues; the previous checkpoint stays."""

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    where = Checkpointing(tmp_path / "kept", ALWAYS)
    cut(run(spec(), checkpointing=where), 3)
    kept = sorted(path.name for path in where.folder.rglob("*"))
    monkeypatch.setattr(snapshot, "write", refuse)
    assert timeless(run(spec(), checkpointing=where)) == timeless(run(spec()))
    assert "goes on without a checkpoint of step" in caplog.text
    assert sorted(path.name for path in where.folder.rglob("*")) == kept
