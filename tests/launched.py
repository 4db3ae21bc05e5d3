"""Ranks as a launcher starts them, for frameworks that open process groups by its variables.

A process imports a module, with the framework, once; ranks of each call are forks of it, so that
none finds what an earlier one left behind.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).parents[1]
_TIMEOUT_S = 120

Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""The name of a function at the top of the module, and its arguments."""


def run_launched(
    module: str, calls: Sequence[Call], folder: Path, num_ranks: int = 2
) -> list[list[Any]]:
    """Make each call on ranks of its own; return the results of each, in the order of ranks.

    Args:
        module: whose functions are called.
        calls: one after the other.
        folder: where ranks work; one of its own for each call would be the call's to make.
        num_ranks: of each call.
    """
    answer = folder / "results.pickle"
    result = subprocess.run(
        [sys.executable, "-m", "tests.launched", module, str(answer), str(num_ranks), str(folder)],
        input=pickle.dumps(list(calls)),
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr.decode()[-4000:]
    return pickle.loads(answer.read_bytes())


def run_example(name: str, arguments: Sequence[str], constants: dict[str, int]) -> str:
    """Run a script of examples/ on this rank; return what it prints."""
    from tests.test_examples import with_constants

    path, output = ROOT / "examples" / f"{name}.py", io.StringIO()
    source = with_constants(path, constants)
    sys.argv = [str(path), *arguments]
    with contextlib.redirect_stdout(output):
        exec(compile(source, path, "exec"), {"__name__": "__main__"})
    return output.getvalue()


def _serve(module: str, answer: str, num_ranks: int, folder: str) -> None:
    import torch

    functions = importlib.import_module(module)
    torch.set_num_threads(1)
    os.chdir(folder)
    context = multiprocessing.get_context("fork")
    results: list[list[Any]] = []
    for name, arguments in pickle.loads(sys.stdin.buffer.read()):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        given = (getattr(functions, name), arguments)
        ranks = [
            context.Process(target=_run, args=(rank, num_ranks, port, pipes[rank][1], *given))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        # As bytes: a tensor through a pipe would be a file of a process that has ended.
        late = pickle.dumps(("late", None))
        sent = [ours.recv_bytes() if ours.poll(_TIMEOUT_S) else late for ours, _ in pipes]
        answers = [pickle.loads(each) for each in sent]
        failed = [failure for failure, _ in answers if failure]
        for rank in ranks:
            rank.kill()  # all have answered, or one never will
            rank.join()
        assert not failed, f"{name} failed:\n{failed[0]}"
        results.append([result for _, result in answers])
    Path(answer).write_bytes(pickle.dumps(results))


def _run(
    rank: int, num_ranks: int, port: int, pipe: Any, function: Any, arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}
    try:
        answer = "", function(*arguments)
    except BaseException:
        answer = traceback.format_exc(), None
    pipe.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
