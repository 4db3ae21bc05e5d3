"""The folder of an experiment: atomic files, and no lost records."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from gossamer.bench.recording import record_run
from gossamer.bench.store import Store, StoreError
from gossamer.errors import UserError
from gossamer.records import Ended, Evaluation, Record, Started

STARTED = Started(run_id="a", spec={}, environment={})


def evaluation(step: int) -> Evaluation:
    return Evaluation(step=step, epoch=0, average=0.5, replicas={}, bytes_sent=0.0, train_s=0.0)


STORY: list[Record] = [STARTED, evaluation(1), Ended(status="done", steps=1)]


def write_story(store: Store, run_id: str, records: Iterable[Record], *, cut: bool = False) -> None:
    with store.writing(run_id) as write:
        for record in records:
            write(record)
        if cut:
            raise KeyboardInterrupt


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    kept = Store(tmp_path / "out")
    with kept.locked("name = 'x'"):
        yield kept


def test_a_run_counts_when_it_is_whole(store: Store) -> None:
    """A run can be read while it is written; it has ended when its last record is on the disk."""
    with store.writing("a") as write:
        for record in STORY:
            write(record)
            assert store.ended("a") is None
            assert store.read("a").records[-1] == record
    assert store.ended("a") == STORY[-1]
    assert store.read("a").records == STORY
    assert store.run_ids() == ["a"]


def test_a_run_that_is_cut_off_is_no_run(store: Store) -> None:
    """After an exception there is no final file, and the next runner removes the partial one."""
    with pytest.raises(KeyboardInterrupt):
        write_story(store, "a", [STARTED], cut=True)
    assert store.ended("a") is None
    assert store.run_ids() == ["a"]


def test_a_file_cut_in_the_middle_says_so_and_keeps_what_it_has(store: Store) -> None:
    """Complete lines are read; a truncated or foreign line is named; the run has not ended."""
    write_story(store, "a", STORY)
    path = store.folder / "runs" / "a.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert store.ended("a") is None
    story = store.read("a")
    assert story.records == STORY[:2]
    assert story.damage.endswith("a.jsonl is truncated after line 2")
    path.write_bytes(whole.replace(b'"evaluation"', b'"elevation"'))
    assert "line 2 cannot be read" in store.read("a").damage
    store.set_aside("a")
    assert (store.folder / "failures" / "a.1.jsonl").exists()
    assert store.run_ids() == []


def test_a_runner_ends_the_file_of_a_process_that_died(store: Store) -> None:
    """Complete lines are kept, an incomplete one is dropped, and the last record has the reason."""
    part = store.folder / "runs" / "a.77.part"
    part.write_text(STARTED.model_dump_json() + "\n" + '{"kind": "eval')
    died = Ended(status="error", reason="killed")
    store.conclude(STARTED, 77, died)
    assert store.read("a").records == [STARTED, died]
    store.conclude(STARTED.model_copy(update={"run_id": "b"}), 78, died)
    assert [record.kind for record in store.read("b").records] == ["started", "ended"]


def test_one_runner_at_a_time(store: Store) -> None:
    """A second one is refused while the first holds the lock."""
    with pytest.raises(StoreError, match="only one runner can use"), Store(store.folder).locked(""):
        pass


def test_leftovers_go_when_a_runner_starts(tmp_path: Path) -> None:
    """Partial files of a killed runner are removed; the experiment's file is kept."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.5.part").write_text("{")
    store = Store(tmp_path)
    with store.locked("name = 'x'"):
        assert store.run_ids() == []
    assert store.experiment_path.read_text() == "name = 'x'"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """One line names the folder and the reason."""
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "out")
    with pytest.raises(StoreError, match=": Not a directory; free disk space"), store.locked(""):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system needs root")
def test_a_full_disk_loses_nothing_that_was_whole(tmp_path: Path) -> None:
    """The run that did not fit is not recorded, others are kept, and with space it resumes."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mount)], check=True)
    try:
        store = Store(mount)
        with store.locked("name = 'x'"):
            write_story(store, "a", STORY)
            too_much = map(evaluation, range(10_000))
            with pytest.raises(StoreError, match="No space left on device"):
                write_story(store, "b", too_much)
            assert store.ended("a") == STORY[-1]
            assert store.ended("b") is None
        with store.locked("name = 'x'"):
            write_story(store, "b", STORY)
        assert store.ended("b") == STORY[-1]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def fail_at_once() -> Iterator[Record]:
    raise UserError("more memory was required")


def fail_later() -> Iterator[Record]:
    yield STARTED
    yield evaluation(1)
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("run", "reason", "metric"),
    [(fail_at_once, "more memory was required", None), (fail_later, "ZeroDivisionError\n", 0.5)],
)
def test_what_a_run_raises_is_its_end(
    store: Store, run: Callable[[], Iterator[Record]], reason: str, metric: float | None
) -> None:
    """Before its first record or later; the outcome has the exception itself."""
    outcome = record_run(store, "a", run, print)
    assert outcome.ended == store.ended("a")
    assert outcome.ended.status == "error"
    assert outcome.ended.reason.endswith(reason)
    assert outcome.metric == metric
    assert type(outcome.failure) is (UserError if run is fail_at_once else ZeroDivisionError)


def test_a_disk_that_refuses_is_no_end_of_a_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run then has no last record, and the caller gets the exception."""

    def refuse(record: Record) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gossamer.bench.store.to_line", refuse)
    with pytest.raises(StoreError, match="No space left"):
        record_run(store, "a", lambda: iter(STORY), print)
    assert store.ended("a") is None
