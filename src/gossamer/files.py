"""Files that are atomic: there entirely, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import UserError


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file aside and rename it; make the folders above it.

    Args:
        path: where it is to be.
        write: writes it to the path that it is given.
    """
    write_all_atomic([path], lambda aside: write(*aside))


def write_all_atomic(paths: Sequence[Path], write: Callable[[list[Path]], Any]) -> None:
    """Write several files aside, and rename them when all are there.

    Args:
        paths: where they are to be.
        write: writes them to the paths that it is given, in the same order.
    """
    # The ending stays: some writers go by it.
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
            with contextlib.suppress(OSError):  # not there: it has its name, or was never begun
                written.unlink()


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: after a crash, a renamed file has its new one."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
