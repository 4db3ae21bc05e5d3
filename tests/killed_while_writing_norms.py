"""What test_bench_norms runs: a run that is killed while its norms become a parquet file.

python -m tests.killed_while_writing_norms FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from gossamer.bench import Store, norms
from gossamer.bench.recording import record_run
from gossamer.engine import RunSpec, run


def write_half(path: Path, *args: Any) -> None:
    """End in the middle of a file."""
    written(path, *args)
    os.truncate(path, path.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    written = norms._write_parquet  # pyright: ignore[reportPrivateUsage]
    norms._write_parquet = write_half  # pyright: ignore[reportPrivateUsage]
    spec = RunSpec(workload="digits-mlp", workers=2, steps_per_epoch=4, epochs=1, log_every=1)
    store = Store(Path(sys.argv[1]))
    with store.locked(""):
        record_run(store, "a", lambda: run(spec, norms_mb=1), print)
