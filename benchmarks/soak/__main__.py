"""A soak test, or the accuracy lost when workers fail and join again.

    python -m benchmarks.soak --minutes 30 [--lab] [--json soak.jsonl] [--workload stdlib-gpt]
    python -m benchmarks.soak --accuracy --seeds 5 [--workload stdlib-gpt]

The first causes a fault on one or two workers of a running job every few seconds, in a sequence
that follows from the seed, and waits until all workers train together again. One worker is spared,
so that it lives through all faults: its use of memory, file descriptors and threads, and that of
the supervisor, must not grow. At the end an undisturbed job of as many steps is the baseline. With
--lab each worker is on a host of its own, and links are cut, too (as root).

The second kills a quarter of the workers at a quarter of the steps, waits for them to join again,
and compares the result with the undisturbed run of the same seed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak.faults import FAULTS, LAB_FAULTS, kill, strike
from benchmarks.soak.job import Job, trends
from benchmarks.soak.worker import Spec
from gossamer.bench.analysis.statistics import interval
from gossamer.workloads import WORKLOADS

_START_S = 600.0
_END_S = 600.0
_GAP_S = (2.0, 8.0)
"""From when all train together to the next fault."""

_ACCURACY_STEPS = {"digits-mlp": 600, "digits-cnn": 400, "stdlib-gpt": 400}
_LR = {"stdlib-gpt": 1e-3}
"""Instead of the workload's own: at 3e-3 any disturbance moves the loss by some percent, up or
down."""


def soak(
    spec: Spec, minutes: float, *, in_lab: bool, note: Callable[[dict[str, Any]], None]
) -> None:
    """Cause faults for a while; report each of them, and the result."""
    generator = np.random.default_rng(spec.seed)
    spared = int(generator.integers(spec.num_workers)) * (not in_lab)  # there 0 holds the store
    faults = FAULTS | (LAB_FAULTS if in_lab else {})
    faults = {name: f for name, f in faults.items() if f[1] < spec.num_workers}
    job = Job(spec, in_lab)
    try:
        if not job.wait(job.all_together, _START_S):
            raise TimeoutError(f"workers did not begin within {_START_S:g} s:\n{job.log()[-3000:]}")
        began, steady_since = time.monotonic(), time.time()
        while time.monotonic() - began < 60 * minutes:
            job.wait(lambda: False, generator.uniform(*_GAP_S))
            name = str(generator.choice([*faults]))
            others = [w for w in range(spec.num_workers) if w != spared]
            victims = generator.choice(others, faults[name][1], replace=False).tolist()
            row = strike(job, name, victims, generator)
            note({"after_s": time.monotonic() - began, **row})
            if not row["together"]:
                note({"log": job.log()[-3000:]})
                break
        until = job.finish()
        ended = job.wait(job.has_ended, _END_S)
        pids = {"supervisor": job.supervisor, "spared worker": job.pid(spared)}
        note(
            {
                "end": "disturbed",
                "num_steps": until,
                "ended": ended,
                "metrics": sorted({end["metric"] for end in job.ends().values()}),
                "failures": job.ends().get(spared, {}).get("failures"),
                "uses": {
                    name: {what: trend._asdict() for what, trend in found.items()}
                    for name, pid in pids.items()
                    if pid and (found := trends(job.uses.get(pid, []), steady_since))
                },
            }
        )
    finally:
        job.close()
    _, metric = run(replace(spec, num_steps=until, pace_s=0.0, constant_lr=True))
    note({"end": "undisturbed", "num_steps": until, "metrics": [metric]})


def run(spec: Spec, victims: list[int] | None = None) -> tuple[dict[str, Any], float]:
    """Train once, and kill some workers meanwhile; return the steps they missed, and the metric."""
    job = Job(spec)
    try:
        missed: dict[str, Any] = {}
        if victims:
            quarter = spec.num_steps // 4
            if not job.wait(lambda: (t := job.last(0)) is not None and t.step >= quarter, _START_S):
                raise TimeoutError(f"no worker came to step {quarter}:\n{job.log()[-3000:]}")
            kill(job, victims, np.random.default_rng())
        if not job.wait(job.has_ended, _END_S):
            raise TimeoutError(f"not all workers came to their end:\n{job.log()[-3000:]}")
        if victims:
            steps = {w: {t.step for t in job.taken(w)} for w in victims}
            missed = {str(w): spec.num_steps - len(taken) for w, taken in steps.items()}
        (metric,) = {end["metric"] for end in job.ends().values()}
        return missed, metric
    finally:
        job.close()


def accuracy(spec: Spec, seeds: int, note: Callable[[dict[str, Any]], None]) -> None:
    """Compare runs that lose a quarter of their workers for a while with undisturbed ones."""
    steps = _ACCURACY_STEPS[spec.workload]
    # A timeout longer than any pause of a loaded machine: only killed workers may be lost.
    spec = replace(spec, num_steps=steps, pace_s=0.02, slow_from=steps // 2, timeout_s=60.0)
    metric_name = WORKLOADS[spec.workload]().metric_name
    differences: list[float] = []
    plain: list[float] = []
    for seed in range(spec.seed, spec.seed + seeds):
        one = replace(spec, seed=seed)
        victims = [1 + seed % (spec.num_workers - 1)]
        victims += [w for w in range(1, spec.num_workers) if w not in victims]
        victims = sorted(victims[: max(spec.num_workers // 4, 1)])
        _, undisturbed = run(replace(one, pace_s=0.0))
        missed, disturbed = run(one, victims)
        differences.append(disturbed - undisturbed)
        plain.append(undisturbed)
        note(
            {
                "workload": spec.workload,
                "seed": seed,
                "steps": steps,
                "missed": missed,
                "undisturbed": undisturbed,
                "disturbed": disturbed,
            }
        )
    if seeds > 1:
        found = interval(differences)
        note(
            {
                "workload": spec.workload,
                "metric": metric_name,
                "undisturbed": float(np.mean(plain)),
                "difference": found.mean,
                "low": found.low,
                "high": found.high,
            }
        )


def _printed(row: dict[str, Any]) -> str:
    if "fault" in row:
        return (
            f"| {row['after_s']:.0f} | {row['fault']} | {', '.join(map(str, row['victims']))} "
            f"| {row['seconds']:.2f} | {row['steps_lost']} | {row['missed']} | {row['back_s']:.1f} "
            f"| {'yes' if row['together'] and row['in_time'] else 'NO'} |"
        )
    return json.dumps(row)


_HEADER = (
    "| after s | fault | workers | went on after s | steps lost | missed by those hit "
    "| back after s | in order |\n|---|---|---|---|---|---|---|---|"
)


def summarize(rows: list[dict[str, Any]]) -> str:
    """Return a table with a row per kind of fault."""
    lines = [
        "| fault | times | went on after s, median | most | steps lost | back after s, median "
        "| in order |\n|---|---|---|---|---|---|---|"
    ]
    faults = [row for row in rows if "fault" in row]
    for name in dict.fromkeys(row["fault"] for row in faults):
        these = [row for row in faults if row["fault"] == name]
        seconds = [row["seconds"] for row in these]
        back = [row["back_s"] for row in these]
        lines.append(
            f"| {name} | {len(these)} | {np.median(seconds):.2f} | {max(seconds):.2f} "
            f"| {sum(row['steps_lost'] for row in these)} | {np.median(back):.1f} "
            f"| {sum(row['together'] and row['in_time'] for row in these)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the soak, or the comparison of accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workload", default="digits-mlp", choices=[*_ACCURACY_STEPS])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--topology", default="one_peer_exponential")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=5.0, help="of the gossip, in seconds")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds per step, of a soak")
    parser.add_argument("--lab", action="store_true", help="cut links, too; as root")
    parser.add_argument("--json", type=Path, help="a file that gets a line for all that is known")
    parser.add_argument("--accuracy", action="store_true", help="a loss and a return, by seed")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    spec = Spec(
        workload=options.workload,
        num_workers=options.workers,
        topology=options.topology,
        seed=options.seed,
        timeout_s=options.timeout,
        pace_s=options.pace,
        lr=_LR.get(options.workload, 0.0),
    )
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(_printed(row), flush=True)

    if options.accuracy:
        accuracy(spec, options.seeds, note)
        return
    print(_HEADER, flush=True)
    soak(spec, options.minutes, in_lab=options.lab, note=note)
    print("\n" + summarize(rows))


if __name__ == "__main__":
    main()
