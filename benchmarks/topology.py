"""Times to build and to analyse the rounds of the catalogue.

    python -m benchmarks.topology [--workers 64 --workers 1008 --workers 10000] [--repeats 3]

One JSON line per topology and number of workers, times in milliseconds (median of the repeats).
``build_ms`` parses the string and builds the first round, ``gap_ms`` is that round's spectral gap,
``spectrum_ms`` the rate per round and the rounds to consensus, ``decay_ms`` eight steps of the
consensus error. Topologies that need a power of two get the next one. Those whose number of
stored edges grows with the square of the workers are left out above 2000.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import typer

from gossamer.errors import UserError
from gossamer.topology import CATALOGUE, Schedule, parse
from gossamer.topology.catalogue import example
from gossamer.topology.spectrum import (
    consensus_decay,
    mixing_rate,
    rounds_to_consensus,
    spectral_gap,
)

DENSE = {"erdos_renyi"}


def main(
    workers: Annotated[list[int], typer.Option()] = [64, 1008, 10_000],  # noqa: B006
    repeats: int = 3,
) -> None:
    """Print one JSON line per topology and number of workers."""
    for num_workers in workers:
        for name in CATALOGUE:
            if num_workers <= 2000 or name not in DENSE:
                print(json.dumps(measure(example(name), num_workers, repeats)), flush=True)


def measure(text: str, num_workers: int, repeats: int) -> dict[str, object]:
    """Return the times of one topology, on the next power of two where it needs one."""
    try:
        schedule = parse(text, num_workers)
    except UserError:
        num_workers = 1 << num_workers.bit_length()
        schedule = parse(text, num_workers)

    def build() -> None:
        parse(text, num_workers).round(0)

    def spectrum() -> None:
        # A schedule caches its last rounds; a fresh one shows the time that a user waits.
        fresh: Schedule = parse(text, num_workers)
        mixing_rate(fresh)
        rounds_to_consensus(fresh)

    return {
        "topology": text,
        "workers": num_workers,
        "period": schedule.period,
        "edges_per_worker": round(float(schedule.round(0).in_degrees.mean()), 2),
        "build_ms": median_ms(build, repeats),
        "gap_ms": median_ms(lambda: spectral_gap(schedule.round(0)), repeats),
        "spectrum_ms": median_ms(spectrum, repeats),
        "decay_ms": median_ms(lambda: consensus_decay(schedule, 8), repeats),
    }


def median_ms(task: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        task()
        times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times), 2)


if __name__ == "__main__":
    typer.run(main)
