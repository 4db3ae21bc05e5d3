"""Atomic writes, and reads of regular files with a size limit.

Records, norms and checkpoints are renamed by their owners: they grow during a run, are kept when it
is interrupted, and are flushed to the disk, which nothing here is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gossamer.errors import UserError


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened, or is not a regular file: a pipe or a device may never end.
    """
    # Non-blocking: opening a pipe would block until there is a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the contents of a file.

    Args:
        path: of a regular file.
        most_bytes: a larger file raises before it is read.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= most_bytes:
            content = file.read(most_bytes + 1)  # it may have grown
            if len(content) <= most_bytes:
                return content
    raise OSError(errno.EFBIG, f"larger than the {most_bytes:,} bytes that are read", str(path))


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a temporary file and rename it; create parent folders. The file is atomic.

    Args:
        path: the final path.
        write: writes the file to the path that it is given.
    """
    write_all_atomic([path], lambda aside: write(*aside))


def write_all_atomic(paths: Sequence[Path], write: Callable[[list[Path]], Any]) -> None:
    """Write several temporary files, and rename them when all are complete.

    Args:
        paths: the final paths.
        write: writes the files to the paths that it is given, in the same order.
    """
    # Keep the suffix: some writers choose the format by it.
    aside = [path.with_name(f".{os.getpid()}.{path.name}") for path in paths]
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        for written, path in zip(aside, paths, strict=True):
            written.replace(path)
    except OSError as error:
        place, reason = os.path.commonpath(paths), error.strerror or error
        raise UserError(f"cannot write {place}: {reason}; choose another place") from error
    finally:
        for written in aside:
            with contextlib.suppress(OSError):  # missing where it was renamed, or never written
                written.unlink()


def sync_folder(folder: Path) -> None:
    """Flush a folder by fsync: a rename in it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
