"""The norms of one run as a columnar file: step, tensor, worker, norm.

During a run they are written to a temporary file, one block of fixed size per step: a run of any
length needs the memory of one step, and the file can be truncated to any step. When the run ends
they become a parquet file, which is renamed when it is on the disk.

    {"tensors": [...], "workers": 8, "every": 25}      a line of JSON
    25.0  norm norm norm ...                           little-endian doubles: the step, and [T, W]
    50.0  norm norm norm ...

Polars is imported only to write and read the parquet file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from gossamer.errors import UserError
from gossamer.extras import needed_by
from gossamer.records import Norms

if TYPE_CHECKING:
    import polars as pl

_log = logging.getLogger(__name__)

_ROWS = 1 << 18
"""About how many rows are built at a time, which bounds the memory of writing the parquet file."""

_DOUBLE = np.dtype("<f8")


def affordable(norms_mb: float) -> float:
    """Return the budget for norms; 0, with a warning, if polars is not installed."""
    if norms_mb and find_spec("polars") is None:
        _log.warning(
            "norms are not stored: they need polars, which is not installed; "
            "pip install 'gossamer[bench]', or set norms_mb = 0"
        )
        return 0.0
    return norms_mb


class _Header(NamedTuple):
    tensors: list[str]
    workers: int
    every: int

    @property
    def block(self) -> int:
        """Bytes of one step."""
        return _DOUBLE.itemsize * (1 + len(self.tensors) * self.workers)


@final
class NormsPart:
    """The norms of a run in progress; the file is created with the first ones.

    Args:
        path: the temporary file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def write(self, norms: Norms) -> None:
        """Append the norms of one step; the first call of a resumed run drops it and later ones."""
        if self._file is None:
            header = _Header(norms.tensors, len(norms.norms[0]), norms.every)
            self._path.parent.mkdir(exist_ok=True)
            self.cut(norms.step - 1)
            self._file = self._path.open("ab")
            if not self._file.tell():
                self._file.write(json.dumps(header._asdict()).encode() + b"\n")
        row = np.concatenate([[norms.step], *norms.norms], dtype=_DOUBLE)
        self._file.write(row.tobytes())
        self._file.flush()  # an interrupted run resumes from what is in the file

    def take_over(self, path: Path) -> None:
        """Continue the file of an interrupted attempt."""
        path.replace(self._path)

    def cut(self, step: int) -> None:
        """Truncate the file after a step; also drops an incomplete block."""
        header = _read_header(self._path)
        if header is None:
            self.discard()
            return
        steps = _blocks(self._path, header)[:, 0]
        kept = int(np.searchsorted(steps, step, side="right"))
        os.truncate(self._path, _header_bytes(self._path) + kept * header.block)

    def finish(self, path: Path) -> None:
        """Write the parquet file, atomically, and remove the temporary file."""
        self.close()
        header = _read_header(self._path)
        if header is not None:
            aside = self._path.with_suffix(".parquet.part")
            _write_parquet(aside, header, _blocks(self._path, header))
            aside.replace(path)
        self.discard()

    def close(self) -> None:
        """Close the temporary file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def discard(self) -> None:
        """Remove the temporary file."""
        self.close()
        self._path.unlink(missing_ok=True)


def read_norms(path: Path) -> pl.DataFrame:
    """Return the table of a file: step, tensor, worker and norm, in this order."""
    with needed_by("norms need"):
        import polars as pl
    with _legible(path):
        return pl.read_parquet(path)


def summarise_norms(path: Path, most_steps: int) -> pl.DataFrame:
    """Return the quantiles of a file's norms over workers, by step and tensor.

    Args:
        path: of the file, which need not fit into memory.
        most_steps: at most so many steps, evenly spaced.
    """
    with needed_by("norms need"):
        import polars as pl
    norm = pl.col("norm")
    with _legible(path):
        table = pl.scan_parquet(path)
        steps = table.select(pl.col("step").unique(maintain_order=True)).collect()["step"]
        places = np.linspace(0, len(steps) - 1, min(len(steps), most_steps)).round().astype(int)
        return (
            table.filter(pl.col("step").is_in(steps.gather(places).to_list()))
            .group_by("step", "tensor", maintain_order=True)
            .agg(
                least=norm.min(),
                lower_quartile=norm.quantile(0.25, "linear"),
                median=norm.median(),
                upper_quartile=norm.quantile(0.75, "linear"),
                largest=norm.max(),
            )
            .collect()
        )


@contextlib.contextmanager
def _legible(path: Path) -> Generator[None]:
    import polars as pl

    try:
        yield
    except pl.exceptions.PolarsError as error:
        raise UserError(
            f"norms must be a parquet file as gossamer writes it, got {path}: {error}; remove it, "
            "and repeat the run"
        ) from error


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return len(file.readline())


def _read_header(path: Path) -> _Header | None:
    """Return the header of a temporary file; None if it has none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        line = file.readline()
    return _Header(**json.loads(line)) if line.endswith(b"\n") else None


def _blocks(path: Path, header: _Header) -> npt.NDArray[np.float64]:
    """Return all complete blocks, [steps, 1 + T·W]: mapped from the file, not loaded."""
    begin = _header_bytes(path)
    count = (path.stat().st_size - begin) // header.block
    if not count:
        return np.empty((0, header.block // _DOUBLE.itemsize))
    shape = (count, header.block // _DOUBLE.itemsize)
    return np.memmap(path, _DOUBLE, "r", begin, shape)


def _write_parquet(path: Path, header: _Header, blocks: npt.NDArray[np.float64]) -> None:
    with needed_by("norms need"):
        import polars as pl
        from polars.io.plugins import register_io_source

    tensors, workers = len(header.tensors), header.workers
    names = pl.Series(header.tensors, dtype=pl.String)
    schema = {"step": pl.Int64, "tensor": pl.String, "worker": pl.Int32, "norm": pl.Float64}
    at_a_time = max(1, _ROWS // (tensors * workers))

    def frames(*_: Any) -> Iterator[pl.DataFrame]:
        for first in range(0, len(blocks), at_a_time):
            some = np.array(blocks[first : first + at_a_time])
            index = np.tile(np.repeat(np.arange(tensors, dtype=np.uint32), workers), len(some))
            yield pl.DataFrame(
                {
                    "step": np.repeat(some[:, 0].astype(np.int64), tensors * workers),
                    "tensor": names.gather(index),
                    "worker": np.tile(np.arange(workers, dtype=np.int32), len(some) * tensors),
                    "norm": some[:, 1:].ravel(),
                }
            )

    metadata = {"norms_every": str(header.every)}
    try:
        register_io_source(frames, schema=schema).sink_parquet(path, metadata=metadata)
    except pl.exceptions.PolarsError as error:  # such as a full disk
        raise OSError(str(error)) from error
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
