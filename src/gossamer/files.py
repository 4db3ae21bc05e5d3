"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.errors import UserError


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file aside and rename it; make the folders above it.

    Args:
        path: where it is to be.
        write: writes it to the path that it is given.
    """
    # The ending stays: some writers go by it.
    aside = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        aside.replace(path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; choose another place"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # not there: it has its name, or was never begun
            aside.unlink()
