"""The folder of an experiment: one file of records per run, and nothing half-written.

    experiment.toml                 what is compared
    planned.json                    its runs, as gossamer.bench.planned reads them
    runs/<id>.jsonl                 a run that came to an end, whichever
    runs/<id>.<process>.part        a run that goes on, or was cut off
    norms/<id>.parquet              its norms, where they are kept: there before the run's file
    norms/<id>.<process>.part       those of a run that goes on, or was cut off
    checkpoints/<id>/               where it goes on from, as gossamer.engine writes it
    failures/<id>.<number>.jsonl    earlier attempts of runs that were tried again
    failures/<id>.<number>.parquet  and their norms

A run's file gets its name when its last record is on the disk. So a folder can be killed at any
moment: what is there is whole, and what is not is run again, from its checkpoint where it has one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from gossamer.bench.norms import NormsPart, read_norms
from gossamer.errors import UserError
from gossamer.files import open_regular, read_bounded, sync_folder
from gossamer.records import Ended, Norms, Record, Started, from_line, to_line

if TYPE_CHECKING:
    import polars as pl

_TAIL = 8192
"""Bytes at the end of a file in which its last line lies, or it is read whole."""


_MOST_BYTES = 2**31
"""Of a file that is read."""

_LONGEST_LINE = 2**24

Stamps: TypeAlias = tuple[tuple[str, int, int], ...]
"""Of one run's files: name, time of the last change, size."""


class StoreError(UserError):
    """A folder cannot be read or written."""


class Story(NamedTuple):
    """What a folder tells of one run: its records in order, to the end or as far as they reach."""

    run_id: str
    records: list[Record]
    damage: str = ""
    """What of its file could not be read."""

    @property
    def ended(self) -> Ended | None:
        """How it ended; None where it goes on, or was cut off."""
        last = self.records[-1] if self.records else None
        return last if isinstance(last, Ended) else None


@final
class Store:
    """An experiment's folder.

    Args:
        folder: made where it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._planned = folder / "planned.json"
        self._runs = folder / "runs"
        self._norms = folder / "norms"
        self._failures = folder / "failures"
        self._checkpoints = folder / "checkpoints"

    # - The whole

    @contextlib.contextmanager
    def locked(self, text: str, plan: str | None = None) -> Generator[None]:
        """Be the only one that runs an experiment here.

        Args:
            text: of the experiment, kept beside its runs.
            plan: which runs it has; without, one of before is removed, which may be of others.
        """
        with _explained(self.folder):
            self._runs.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("a")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreError(
                    f"one runner at a time must work in {self.folder}, got a second one; wait for "
                    "the other to end, or choose another folder with --out"
                ) from None
            with _explained(self.folder):
                for part in [*self._runs.glob("*.part"), *self._norms.glob("*.part")]:
                    # A run that goes on inside itself yields its records again, but not its norms.
                    goes_on = part.parent == self._norms and self._has_checkpoint(part)
                    if not goes_on:
                        part.unlink()  # first: where the disk is full, this makes room
                self._planned.unlink(missing_ok=True)  # first: it never stands beside another text
                _replace(self.experiment_path, text)
                if plan is not None:
                    _replace(self._planned, plan)
            yield

    def plan(self, text: str) -> None:
        """Say which runs the experiment has, where that is known only as it goes on."""
        with _explained(self.folder):
            _replace(self._planned, text)

    @property
    def experiment_path(self) -> Path:
        """Where the text of the experiment is kept."""
        return self.folder / "experiment.toml"

    def planned(self) -> str | None:
        """Return which runs the experiment has, as it was given; None where it was not."""
        if not self._planned.exists():
            return None
        with _explained(self._planned):
            return read_bounded(self._planned, _MOST_BYTES).decode(errors="replace")

    def run_ids(self) -> list[str]:
        """Return the runs that have a file, whole or in part."""
        return list(self.stamps())

    def stamps(self) -> dict[str, Stamps]:
        """Return what tells whether anything has changed: by run, its files, times and sizes."""
        found: dict[str, list[tuple[str, int, int]]] = {}
        for path in sorted([*self._runs.glob("*.jsonl"), *self._runs.glob("*.part")]):
            try:
                status = path.stat()
            except FileNotFoundError:  # renamed meanwhile
                continue
            if not stat.S_ISREG(status.st_mode):  # a pipe or a folder holds no records
                continue
            stamp = (path.name, status.st_mtime_ns, status.st_size)
            found.setdefault(path.name.split(".")[0], []).append(stamp)
        return {run_id: tuple(stamps) for run_id, stamps in found.items()}

    def drop_checkpoints(self, but: Collection[str]) -> None:
        """Remove what no run goes on from any more.

        Args:
            but: runs whose checkpoints stay.
        """
        for path in self._checkpoints.glob("*"):
            if path.name not in but:
                self.drop_checkpoint(path.name)

    # - One run

    def checkpoint_folder(self, run_id: str) -> Path:
        """Return where a run keeps its checkpoint."""
        return self._checkpoints / run_id

    def drop_checkpoint(self, run_id: str) -> None:
        """Remove the checkpoint of a run that came to its end."""
        shutil.rmtree(self.checkpoint_folder(run_id), ignore_errors=True)
        with contextlib.suppress(OSError):  # other runs have theirs, or there was none
            self._checkpoints.rmdir()

    def ended(self, run_id: str) -> Ended | None:
        """Return how a run ended, from the last line of its file alone; None where it did not."""
        try:
            with _explained(self._path(run_id)), open_regular(self._path(run_id)) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                tail = file.read()
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        last = tail.rstrip(b"\n").rpartition(b"\n")[2]
        try:
            record = from_line(last.decode())
        except (UserError, UnicodeDecodeError):
            return self.read(run_id).ended  # a long last line, or a damaged one
        return record if isinstance(record, Ended) else None

    def started(self, run_id: str) -> Started | None:
        """Return how a run began that has ended, from the first line of its file alone."""
        try:
            with open_regular(self._path(run_id)) as file:
                record = from_line(file.readline(_LONGEST_LINE).decode())
        except (OSError, UnicodeDecodeError, UserError):
            return None
        return record if isinstance(record, Started) else None

    def read(self, run_id: str) -> Story:
        """Return the records of a run, as far as they can be read."""
        path = self._path(run_id)
        if not path.exists():
            path = max(self._runs.glob(f"{run_id}.*.part"), key=_modified, default=path)
        with _explained(path):
            lines = read_bounded(path, _MOST_BYTES).split(b"\n")
        records: list[Record] = []
        for number, line in enumerate(lines, start=1):
            if number == len(lines):  # what follows the last newline is not yet a line
                break
            try:
                records.append(from_line(line.decode()))
            except (UserError, UnicodeDecodeError) as error:
                return Story(run_id, records, f"{path}: line {number} cannot be read: {error}")
        cut = path.suffix == ".jsonl" and not (records and isinstance(records[-1], Ended))
        return Story(run_id, records, f"{path} is cut after line {len(records)}" if cut else "")

    def stories(self) -> Iterator[Story]:
        """Yield all runs."""
        return map(self.read, self.run_ids())

    def norms(self, run_id: str) -> pl.DataFrame | None:
        """Return the L2 norm of every tensor on every replica, just before they were averaged.

        Columns step, tensor, worker and norm, in this order; None where the run has not ended, or
        has none. Of which steps they are, and why, says ``norms_every`` of its first record.
        """
        path = self.norms_path(run_id)
        if not path.is_file() or self.ended(run_id) is None:
            return None
        with _explained(path):
            return read_norms(path)

    def norms_path(self, run_id: str) -> Path:
        """Return where a run's norms are, where it has any."""
        return self._norms / f"{run_id}.parquet"

    @contextlib.contextmanager
    def writing(self, run_id: str) -> Generator[Callable[[Record], None]]:
        """Write the records of a run; they count when the block ends without an exception."""
        part = self._part(run_id, os.getpid())
        norms = self._norms_part(run_id, os.getpid())
        with _explained(part):
            lines = part.open("w")
            for cut_off in self._norms.glob(f"{run_id}.*.part"):
                norms.take_over(cut_off)
            self.norms_path(run_id).unlink(missing_ok=True)  # of what ended without a file

        def write(record: Record) -> None:
            with _explained(part):
                if isinstance(record, Norms):
                    norms.write(record)
                    return
                if isinstance(record, Ended):
                    norms.cut(record.steps)
                lines.write(to_line(record) + "\n")
                lines.flush()

        try:
            yield write
            with _explained(part):
                os.fsync(lines.fileno())
                norms.finish(self.norms_path(run_id))
        finally:
            for file in (lines, norms):
                with contextlib.suppress(OSError):  # of a full disk, once more
                    file.close()
        self._settle(part, run_id)

    def conclude(self, started: Started, process: int, ended: Ended) -> None:
        """End the file of a run whose process could not; a file that is whole stays as it is."""
        if self.ended(started.run_id) is not None:
            return
        part = self._part(started.run_id, process)
        with _explained(part):
            norms = self._norms_part(started.run_id, process)
            if not self.checkpoint_folder(started.run_id).exists():
                norms.discard()
            written = part.read_bytes() if part.exists() else b""
            whole = written[: written.rfind(b"\n") + 1] or f"{to_line(started)}\n".encode()
            with part.open("wb") as file:
                file.write(whole + f"{to_line(ended)}\n".encode())
                file.flush()
                os.fsync(file.fileno())
        self._settle(part, started.run_id)

    def set_aside(self, run_id: str) -> None:
        """Keep the file of a run that failed or is damaged, and is to be run again."""
        if not self._path(run_id).exists():
            return
        with _explained(self._failures):
            self._failures.mkdir(exist_ok=True)
            before = [path.name.split(".")[1] for path in self._failures.glob(f"{run_id}.*.jsonl")]
            number = 1 + max((int(each) for each in before if each.isdecimal()), default=0)
            if self.norms_path(run_id).exists():
                self.norms_path(run_id).rename(self._failures / f"{run_id}.{number}.parquet")
            self._path(run_id).rename(self._failures / f"{run_id}.{number}.jsonl")

    def _has_checkpoint(self, part: Path) -> bool:
        return self.checkpoint_folder(part.name.split(".")[0]).exists()

    def _settle(self, part: Path, run_id: str) -> None:
        with _explained(part):
            part.replace(self._path(run_id))
            sync_folder(self._runs)

    def _path(self, run_id: str) -> Path:
        return self._runs / f"{run_id}.jsonl"

    def _part(self, run_id: str, process: int) -> Path:
        return self._runs / f"{run_id}.{process}.part"

    def _norms_part(self, run_id: str, process: int) -> NormsPart:
        return NormsPart(self._norms / f"{run_id}.{process}.part")


def _replace(path: Path, text: str) -> None:
    # Not files.write_atomic: what fails is a StoreError, which says what is kept.
    aside = path.with_name(f"{path.name}.part")
    try:
        aside.write_text(text)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _modified(path: Path) -> float:
    return path.stat().st_mtime


@contextlib.contextmanager
def _explained(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"records must be kept in {path}, got: {error.strerror or error}; make room or choose "
            "another folder with --out, and start again: runs that ended are kept"
        ) from error
