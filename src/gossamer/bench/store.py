"""The folder of an experiment: one file of records per run, written atomically.

    experiment.toml                 the experiment
    planned.json                    its runs, as gossamer.bench.planned reads them
    runs/<id>.jsonl                 a run that has ended, with any status
    runs/<id>.<process>.part        a run in progress, or an interrupted one
    norms/<id>.parquet              norms, if stored: renamed before the run's file
    norms/<id>.<process>.part       norms of a run in progress, or of an interrupted one
    checkpoints/<id>/               what a run resumes from, as gossamer.engine writes it
    failures/<id>.<number>.jsonl    earlier attempts of runs that were retried
    failures/<id>.<number>.parquet  and their norms

A run's file is renamed to its final name when its last record is on the disk. So the runner can be
killed at any moment: files that exist are complete, and other runs are run again, from their
checkpoints if they have one.
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
"""Bytes at the end of a file that are read to find its last line; then the entire file."""


_MOST_BYTES = 2**31
"""The largest file that is read."""

_LONGEST_LINE = 2**24

Stamps: TypeAlias = tuple[tuple[str, int, int], ...]
"""The files of one run: name, modification time, size."""


class StoreError(UserError):
    """A folder cannot be read or written."""


class Story(NamedTuple):
    """The records of one run, in order; those before the damage where the file is damaged."""

    run_id: str
    records: list[Record]
    damage: str = ""
    """What could not be read; empty if nothing is damaged."""

    @property
    def ended(self) -> Ended | None:
        """The last record if the run has ended; None if it is in progress or was interrupted."""
        last = self.records[-1] if self.records else None
        return last if isinstance(last, Ended) else None


@final
class Store:
    """An experiment's folder.

    Args:
        folder: created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._planned = folder / "planned.json"
        self._runs = folder / "runs"
        self._norms = folder / "norms"
        self._failures = folder / "failures"
        self._checkpoints = folder / "checkpoints"

    # - The experiment

    @contextlib.contextmanager
    def locked(self, text: str, plan: str | None = None) -> Generator[None]:
        """Hold the lock of the folder, so that only one runner works in it.

        Args:
            text: the experiment's file, stored beside its runs.
            plan: its runs; None removes an older plan, which may be of another experiment.
        """
        with _explained(self.folder):
            self._runs.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("a")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreError(
                    f"only one runner can use {self.folder}, and another one holds its lock; wait "
                    "for it to end, or choose another folder with --out"
                ) from None
            with _explained(self.folder):
                for part in [*self._runs.glob("*.part"), *self._norms.glob("*.part")]:
                    # A run that resumes yields its records again, but not its norms.
                    resumes = part.parent == self._norms and self._has_checkpoint(part)
                    if not resumes:
                        part.unlink()  # first, because it frees space where the disk is full
                # Before the text is replaced: a plan must never be beside another text.
                self._planned.unlink(missing_ok=True)
                _replace(self.experiment_path, text)
                if plan is not None:
                    _replace(self._planned, plan)
            yield

    def plan(self, text: str) -> None:
        """Replace the plan, where the results of trials add runs to it."""
        with _explained(self.folder):
            _replace(self._planned, text)

    @property
    def experiment_path(self) -> Path:
        """The path of the experiment's file."""
        return self.folder / "experiment.toml"

    def planned(self) -> str | None:
        """Return the stored plan; None if there is none."""
        if not self._planned.exists():
            return None
        with _explained(self._planned):
            return read_bounded(self._planned, _MOST_BYTES).decode(errors="replace")

    def run_ids(self) -> list[str]:
        """Return the runs that have a file, complete or not."""
        return list(self.stamps())

    def stamps(self) -> dict[str, Stamps]:
        """Return names, times and sizes of each run's files, which change when its records do."""
        found: dict[str, list[tuple[str, int, int]]] = {}
        for path in sorted([*self._runs.glob("*.jsonl"), *self._runs.glob("*.part")]):
            try:
                status = path.stat()
            except FileNotFoundError:  # renamed since glob()
                continue
            if not stat.S_ISREG(status.st_mode):  # a pipe or a folder holds no records
                continue
            stamp = (path.name, status.st_mtime_ns, status.st_size)
            found.setdefault(path.name.split(".")[0], []).append(stamp)
        return {run_id: tuple(stamps) for run_id, stamps in found.items()}

    def drop_checkpoints(self, but: Collection[str]) -> None:
        """Remove checkpoints that no run needs any more.

        Args:
            but: runs whose checkpoints are kept.
        """
        for path in self._checkpoints.glob("*"):
            if path.name not in but:
                self.drop_checkpoint(path.name)

    # - One run

    def checkpoint_folder(self, run_id: str) -> Path:
        """Return the folder of a run's checkpoint."""
        return self._checkpoints / run_id

    def drop_checkpoint(self, run_id: str) -> None:
        """Remove the checkpoint of a run."""
        shutil.rmtree(self.checkpoint_folder(run_id), ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty, or missing
            self._checkpoints.rmdir()

    def ended(self, run_id: str) -> Ended | None:
        """Return the last record of a run, from the end of its file; None if it has not ended."""
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
        """Return the first record of a run that has ended, reading only the first line."""
        try:
            with open_regular(self._path(run_id)) as file:
                record = from_line(file.readline(_LONGEST_LINE).decode())
        except (OSError, UnicodeDecodeError, UserError):
            return None
        return record if isinstance(record, Started) else None

    def read(self, run_id: str) -> Story:
        """Return the records of a run, up to the first that cannot be read."""
        path = self._path(run_id)
        if not path.exists():
            path = max(self._runs.glob(f"{run_id}.*.part"), key=_modified, default=path)
        with _explained(path):
            lines = read_bounded(path, _MOST_BYTES).split(b"\n")
        records: list[Record] = []
        for number, line in enumerate(lines, start=1):
            if number == len(lines):  # the rest after the last newline is incomplete
                break
            try:
                records.append(from_line(line.decode()))
            except (UserError, UnicodeDecodeError) as error:
                return Story(run_id, records, f"{path}: line {number} cannot be read: {error}")
        cut = path.suffix == ".jsonl" and not (records and isinstance(records[-1], Ended))
        return Story(
            run_id, records, f"{path} is truncated after line {len(records)}" if cut else ""
        )

    def stories(self) -> Iterator[Story]:
        """Yield all runs."""
        return map(self.read, self.run_ids())

    def norms(self, run_id: str) -> pl.DataFrame | None:
        """Return the L2 norm of every tensor on every replica, just before they were averaged.

        Columns step, tensor, worker and norm, in this order; None if the run has not ended or has
        no norms. ``norms_every`` in its first record is the interval between stored steps.
        """
        path = self.norms_path(run_id)
        if not path.is_file() or self.ended(run_id) is None:
            return None
        with _explained(path):
            return read_norms(path)

    def norms_path(self, run_id: str) -> Path:
        """Return the path of a run's norms."""
        return self._norms / f"{run_id}.parquet"

    @contextlib.contextmanager
    def writing(self, run_id: str) -> Generator[Callable[[Record], None]]:
        """Write the records of a run; its file appears when the block ends without an exception."""
        part = self._part(run_id, os.getpid())
        norms = self._norms_part(run_id, os.getpid())
        with _explained(part):
            lines = part.open("w")
            for cut_off in self._norms.glob(f"{run_id}.*.part"):
                norms.take_over(cut_off)
            self.norms_path(run_id).unlink(missing_ok=True)  # of an attempt without a file

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
                with contextlib.suppress(OSError):  # a full disk raises again on close
                    file.close()
        self._settle(part, run_id)

    def conclude(self, started: Started, process: int, ended: Ended) -> None:
        """Complete the file of a run whose process died; a file that is complete is not changed."""
        if self.ended(started.run_id) is not None:
            return
        part = self._part(started.run_id, process)
        with _explained(part):
            norms = self._norms_part(started.run_id, process)
            if not self.checkpoint_folder(started.run_id).exists():
                norms.discard()
            written = part.read_bytes() if part.exists() else b""
            complete = written[: written.rfind(b"\n") + 1] or f"{to_line(started)}\n".encode()
            with part.open("wb") as file:
                file.write(complete + f"{to_line(ended)}\n".encode())
                file.flush()
                os.fsync(file.fileno())
        self._settle(part, started.run_id)

    def set_aside(self, run_id: str) -> None:
        """Move the file of a failed or damaged run to ``failures``, before it is run again."""
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
    # Not files.write_atomic: the caller turns an OSError into a StoreError.
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
            f"cannot read or write {path}: {error.strerror or error}; free disk space or choose "
            "another folder with --out, and start again: runs that have ended are kept"
        ) from error
