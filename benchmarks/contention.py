"""The slowdown of a simulation beside busy processes, by its threads and how these wait.

    python -m benchmarks.contention [--model mlp] [--workers 64] [--way 2:default --way 2:1000]

A way is a number of threads and, after a colon, how idle threads wait: ``default`` as OpenMP does,
``passive`` asleep, ``own`` as in runs of ``gossamer bench run``, or a number for
``GOMP_SPINCOUNT``, the iterations of a spin loop before they sleep. OpenMP reads that when torch is
imported, so every way has its own process; they are interleaved, beside 0, 1 and 2 busy processes.

One JSON line per way and number of neighbours, medians of the rounds:

- ``ms_per_step``, and ``cpu_ms_per_step`` of all threads.
- ``fast_ms_per_step``: the tenth percentile of single steps of the best round, which other jobs
  did not disturb.
- ``speed``: relative to the first way without neighbours in the same round.
- ``kept``: relative to itself without neighbours in the same round.
- ``share``: the speed that a way would keep if all threads got equal shares of the cores, and none
  waited for another.

Other jobs on the machine are further neighbours. ``--idle`` waits before each turn until there are
none, which happens on a shared machine too; short ``--seconds`` then help.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, NamedTuple, final

import torch
import typer

from benchmarks.models import WORKLOADS, loss_of, make_optimizer
from gossamer import Simulation
from gossamer.bench.threads import WAIT

WARMUP = 10
DEFAULT_WAYS = ["2:default", "2:passive", "2:own", "1:default"]
NEIGHBOURS = [0, 1, 2]

_IDLE_S, _IDLE_TICKS = 0.06, 2
"""How long cores must be idle, and how many ticks of 10 ms count as busy."""

_BUSY = (
    "import os, sys; parent = os.getppid(); print(flush=True)\nwhile os.getppid() == parent: pass"
)


class Trial(NamedTuple):
    """Times of single steps."""

    wall_s: float
    cpu_s: float
    fast_s: float
    """The tenth percentile of single steps' times."""


def main(
    model: Annotated[str, typer.Option(help="As in benchmarks.models.")] = "mlp",
    workers: Annotated[int, typer.Option(min=1, help="Virtual workers.")] = 64,
    way: Annotated[list[str], typer.Option(help="THREADS:WAIT.")] = DEFAULT_WAYS,
    neighbours: Annotated[list[int], typer.Option(min=0, help="Busy processes.")] = NEIGHBOURS,
    rounds: Annotated[int, typer.Option(min=1, help="Of every way beside every number.")] = 15,
    seconds: Annotated[float, typer.Option(help="Of one trial.")] = 0.25,
    idle: Annotated[bool, typer.Option("--idle", help="Wait until the machine is idle.")] = False,
    part: Annotated[bool, typer.Option("--part", hidden=True)] = False,
) -> None:
    """Print one JSON line per way and number of busy neighbours."""
    if part:
        step_when_told(model, workers, seconds)
        return
    options = ["--model", model, "--workers", str(workers), "--seconds", str(seconds)]
    trials: dict[tuple[str, int], list[Trial]] = {(w, n): [] for n in neighbours for w in way}
    with contextlib.ExitStack() as stack:
        processes = {w: stack.enter_context(contextlib.closing(Way(w, options))) for w in way}
        for _ in range(rounds):
            for count in neighbours:
                if idle:
                    wait_until_idle()
                with busy(count):
                    for name, process in processes.items():
                        trials[name, count].append(process.measure())
    for name, count in trials:
        print(json.dumps({"model": model, "workers": workers} | row(trials, name, count)))


def row(trials: dict[tuple[str, int], list[Trial]], name: str, count: int) -> dict[str, object]:
    """Return the printed row of one way beside so many neighbours."""
    own = trials[name, count]
    quiet = min(neighbours for _, neighbours in trials)
    threads, cores = int(name.split(":")[0]), len(os.sched_getaffinity(0))
    equal = min(1.0, cores / (threads + count)) / min(1.0, cores / threads)
    return {
        "way": name,
        "neighbours": count,
        "ms_per_step": round(1e3 * statistics.median(one.wall_s for one in own), 2),
        "cpu_ms_per_step": round(1e3 * statistics.median(one.cpu_s for one in own), 2),
        "fast_ms_per_step": round(1e3 * min(one.fast_s for one in own), 2),
        "speed": _median_speed(trials[next(iter(trials))[0], quiet], own),
        "kept": _median_speed(trials[name, quiet], own),
        "share": round(equal, 2),
    }


def _median_speed(base: list[Trial], own: list[Trial]) -> float:
    ratios = [one.wall_s / other.wall_s for one, other in zip(base, own, strict=True)]
    return round(statistics.median(ratios), 2)


def environment_of(way: str) -> dict[str, str]:
    """Return the variables of a process that computes in this way."""
    threads, _, wait = way.partition(":")
    policies = {"default": {}, "passive": {"OMP_WAIT_POLICY": "passive"}, "own": WAIT}
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    return clean | {"OMP_NUM_THREADS": threads} | policies.get(wait, {"GOMP_SPINCOUNT": wait})


@final
class Way:
    """A process that takes steps in one way on request; it must be closed."""

    def __init__(self, way: str, options: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contention", "--part", *options],
            env=environment_of(way),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.measure()  # the first trial of a process is slower

    def measure(self) -> Trial:
        """Return the times of its steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return Trial(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._process.kill()


def step_when_told(model: str, workers: int, seconds: float) -> None:
    """Take steps for a while for every line of stdin, and print their times."""
    torch.manual_seed(0)
    workload = WORKLOADS[model]
    inputs, targets = workload.sample(workers, workload.batch)
    sim = Simulation(workload.build(), loss_of, make_optimizer, workers, topology="ring")
    for _ in range(WARMUP):
        sim.step(inputs, targets)
    for _ in sys.stdin:
        times: list[float] = []
        cpu = time.process_time()
        while sum(times) < seconds:
            began = time.perf_counter()
            sim.step(inputs, targets)
            times.append(time.perf_counter() - began)
        cpu_s = (time.process_time() - cpu) / len(times)
        fast_s = sorted(times)[len(times) // 10]
        print(json.dumps(Trial(statistics.fmean(times), cpu_s, fast_s)), flush=True)


def wait_until_idle() -> None:
    """Return when all cores have been idle for a moment."""
    before = -_IDLE_TICKS
    while (now := _busy_ticks()) - before >= _IDLE_TICKS:
        before = now
        time.sleep(_IDLE_S)


def _busy_ticks() -> int:
    """Return the total busy time of all cores, in ticks of 10 ms."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + sum(rest)


@contextlib.contextmanager
def busy(count: int) -> Generator[None]:
    """Run so many busy processes."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(_counting())
        yield


@contextlib.contextmanager
def _counting() -> Generator[None]:
    with subprocess.Popen([sys.executable, "-S", "-c", _BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it is there
        try:
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    typer.run(main)
