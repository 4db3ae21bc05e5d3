"""Run some of the runs behind the evidence again, and compare their results.

    python -m benchmarks.again evidence/ada-fashion-64.csv --data-dir data
    python -m benchmarks.again evidence/gamma-fashion.csv --runs 10 --seed 1

An experiment takes hours, and its result is one row per run: a few runs, drawn at random, say
within minutes whether this code on this machine still gives what is written. Trials of learning
rates are drawn, too. Prints a row for each file, and every run whose result is not that of the
file, which has six digits.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.evidence import Result, read, rounded
from gossamer.engine import RunSpec, run
from gossamer.errors import UserError
from gossamer.records import Ended, Evaluation


def result_of(spec: RunSpec) -> float | None:
    """Return the final metric of a run as evidence keeps it: None if it diverged."""
    torch.set_num_threads(1)
    final = None
    for record in run(spec):
        if isinstance(record, Evaluation):
            final = record.average
        elif isinstance(record, Ended) and record.status != "done":
            return None
    return None if final is None else rounded(final)


def draw(results: list[Result], runs: int, seed: int) -> list[Result]:
    """Return so many results, or all if there are fewer, drawn without replacement."""
    return random.Random(seed).sample(results, min(runs, len(results)))


def differs(result: Result, now: float | None) -> bool:
    """Return whether a result is not the one that was written."""
    return now != result.final


def row(path: Path, drawn: list[Result], now: list[float | None]) -> str:
    """Return the table's row of a file."""
    equal = sum(not differs(*pair) for pair in zip(drawn, now, strict=True))
    apart = [
        abs(new / old.final - 1) for old, new in zip(drawn, now, strict=True) if old.final and new
    ]
    largest = f"{max(apart):.1e}" if any(apart) else "0"
    return f"| {path.stem} | {len(drawn)} | {equal} | {largest} |"


def main(
    paths: Annotated[list[Path], typer.Argument(help="Files of python -m benchmarks.evidence.")],
    runs: Annotated[int, typer.Option(min=1, help="Runs of each file.")] = 2,
    seed: Annotated[int, typer.Option(help="Other seeds draw other runs.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Concurrent runs.")] = 2,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of data sets; by default GOSSAMER_DATA.")
    ] = None,
) -> None:
    """Run a few runs of each file again, and print whether their results are those of the file."""
    if strange := [path for path in paths if path.suffix != ".csv"]:
        raise UserError(
            f"files must be .csv files of python -m benchmarks.evidence, got {strange[0]}; "
            "write one from a folder with its --out"
        )
    if data_dir is not None:
        os.environ["GOSSAMER_DATA"] = str(data_dir.absolute())
    drawn = {path: draw(read(path), runs, seed) for path in paths}
    print("| file | runs | equal | largest relative difference |")
    print("|---|---|---|---|")
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        pending = {
            path: [pool.submit(result_of, result.spec) for result in results]
            for path, results in drawn.items()
        }
        other: list[str] = []
        for path, results in drawn.items():
            now = [each.result() for each in pending[path]]
            print(row(path, results, now), flush=True)
            other += [
                f"{path.stem} {old.spec.id} ({old.spec.method}): {new}, not {old.final}"
                for old, new in zip(results, now, strict=True)
                if differs(old, new)
            ]
    if other:
        print("\n" + "\n".join(other))


if __name__ == "__main__":
    typer.run(main)
