"""Reading the files of data sets, and errors for missing or damaged ones."""

from __future__ import annotations

import gzip
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gossamer.errors import UserError

DATA_ENV = "GOSSAMER_DATA"


def data_folder() -> Path:
    """Return the folder that holds data sets: $GOSSAMER_DATA, or ~/.cache/gossamer."""
    return Path(os.environ.get(DATA_ENV) or "~/.cache/gossamer").expanduser()


@final
@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of one data set.

    Args:
        data_set: its name in ``sources.DATA_SETS``.
        folder: that contains all data sets.
    """

    data_set: str
    folder: Path

    def read(self, name: str, num_bytes: int | None = None) -> bytes:
        """Return the contents of a file, after a check of its size where that is known."""
        path = self.folder / name
        try:
            contents = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise self.missing(name) from None
        except OSError as error:
            raise UserError(
                f"{path} must be readable, got {error.strerror}; change its permissions, or set "
                f"{DATA_ENV} to another folder"
            ) from error
        if num_bytes is not None and len(contents) != num_bytes:
            raise self.damaged(name, f"{num_bytes:,} bytes", f"{len(contents):,}")
        return contents

    def read_gzip(self, name: str) -> bytes:
        """Return the contents of a compressed file."""
        try:
            return gzip.decompress(self.read(name))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self.damaged(name, "a complete gzip file", str(error)) from error

    def read_lines(self, name: str, num: int | None = None) -> list[str]:
        """Return the lines of a text file, after a check of their number where that is known."""
        try:
            lines = self.read(name).decode().split("\n")
        except UnicodeDecodeError as error:
            raise self.damaged(name, "text in UTF-8", str(error)) from error
        if lines[-1] == "":
            lines.pop()
        if num is not None and len(lines) != num:
            raise self.damaged(name, f"{num:,} lines", f"{len(lines):,}")
        return lines

    def missing(self, name: str) -> UserError:
        """Return the error that says where a file was looked for and how to get it."""
        return UserError(
            f"{self.data_set} needs {name}, which is not in {self.folder}; get it with "
            f"gossamer data {self.data_set} --data-dir {self.folder}, or set {DATA_ENV} or "
            "--data-dir to the folder that has it"
        )

    def damaged(self, name: str, expected: str, found: str) -> UserError:
        """Return the error that says what is wrong with a file and how to get a good one."""
        return UserError(
            f"{self.folder / name} must have {expected}, got {found}; remove it, and get it with "
            f"gossamer data {self.data_set} --data-dir {self.folder}"
        )
