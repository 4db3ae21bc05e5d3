"""The folder of an experiment: one file of records per run, and nothing half-written.

    experiment.toml                 what is compared
    runs/<id>.jsonl                 a run that came to an end, whichever
    runs/<id>.<process>.part        a run that goes on, or was cut off
    failures/<id>.<number>.jsonl    earlier attempts of runs that were tried again

A run's file gets its name when its last record is on the disk. So a folder can be killed at any
moment: what is there is whole, and what is not is run again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias, final

from gossamer.errors import UserError
from gossamer.records import Ended, Record, Started, from_line, to_line

_TAIL = 8192
"""Bytes at the end of a file in which its last line lies, or it is read whole."""


Stamps: TypeAlias = tuple[tuple[str, int, int], ...]
"""Of one run's files: name, time of the last change, size."""


class StoreError(UserError):
    """A folder cannot be read or written."""


class Story(NamedTuple):
    """What is known of one run."""

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
        self._runs = folder / "runs"
        self._failures = folder / "failures"

    # - The whole

    @contextlib.contextmanager
    def locked(self, text: str) -> Generator[None]:
        """Be the only one that runs an experiment here.

        Args:
            text: of the experiment, kept beside its runs.
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
                for part in self._runs.glob("*.part"):
                    part.unlink()  # first: where the disk is full, this makes room
                aside = self.folder / "experiment.toml.part"
                aside.write_text(text)
                aside.replace(self.experiment_path)
            yield

    @property
    def experiment_path(self) -> Path:
        """Where the text of the experiment is kept."""
        return self.folder / "experiment.toml"

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
            stamp = (path.name, status.st_mtime_ns, status.st_size)
            found.setdefault(path.name.split(".")[0], []).append(stamp)
        return {run_id: tuple(stamps) for run_id, stamps in found.items()}

    # - One run

    def ended(self, run_id: str) -> Ended | None:
        """Return how a run ended, from the last line of its file alone; None where it did not."""
        try:
            with self._path(run_id).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                tail = file.read()
        except FileNotFoundError:
            return None
        last = tail.rstrip(b"\n").rpartition(b"\n")[2]
        try:
            record = from_line(last.decode())
        except (UserError, UnicodeDecodeError):
            return self.read(run_id).ended  # a long last line, or a damaged one
        return record if isinstance(record, Ended) else None

    def read(self, run_id: str) -> Story:
        """Return the records of a run, as far as they can be read."""
        path = self._path(run_id)
        if not path.exists():
            path = max(self._runs.glob(f"{run_id}.*.part"), key=_modified, default=path)
        with _explained(path):
            lines = path.read_bytes().split(b"\n")
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

    @contextlib.contextmanager
    def writing(self, run_id: str) -> Generator[Callable[[Record], None]]:
        """Write the records of a run; they count when the block ends without an exception."""
        part = self._part(run_id, os.getpid())
        with _explained(part):
            lines = part.open("w")

        def write(record: Record) -> None:
            with _explained(part):
                lines.write(to_line(record) + "\n")
                lines.flush()

        try:
            yield write
            with _explained(part):
                os.fsync(lines.fileno())
        finally:
            with contextlib.suppress(OSError):  # of a full disk, once more
                lines.close()
        self._settle(part, run_id)

    def conclude(self, started: Started, process: int, ended: Ended) -> None:
        """End the file of a run whose process could not; a file that is whole stays as it is."""
        if self.ended(started.run_id) is not None:
            return
        part = self._part(started.run_id, process)
        with _explained(part):
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
            number = 1 + max(map(int, before), default=0)
            self._path(run_id).rename(self._failures / f"{run_id}.{number}.jsonl")

    def _settle(self, part: Path, run_id: str) -> None:
        with _explained(part):
            part.replace(self._path(run_id))
            folder = os.open(self._runs, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _path(self, run_id: str) -> Path:
        return self._runs / f"{run_id}.jsonl"

    def _part(self, run_id: str, process: int) -> Path:
        return self._runs / f"{run_id}.{process}.part"


def _modified(path: Path) -> float:
    return path.stat().st_mtime


@contextlib.contextmanager
def _explained(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"records must be kept in {path}, got: {error.strerror}; make room or choose another "
            "folder with --out, and start again: runs that ended are kept"
        ) from error
