"""Cost and benefit of control: `python -m benchmarks.consensus` on digits with 32 workers.

Plain gossip, fixed targets, Ada's open loop, AdaConsensus and the exact average, from the same
seeds; bytes per worker, the averaged model's accuracy, and how often the exact distance after
mixing is within 1.1 × its target. One JSON line per run, then a table of means over seeds.
"""

from __future__ import annotations

import json
import math
import statistics
from typing import Annotated, Any

import torch
import typer

from gossamer import Simulation
from gossamer.engine import RunSpec
from gossamer.engine.batches import Batches
from gossamer.engine.spec import set_lr

# Name, topology, order, control. Ada goes from half of the workers down to a ring within the run.
METHODS: list[tuple[str, str, str, str]] = [
    ("plain ring", "ring", "atc", "plain"),
    ("constant 1/2", "ring", "atc", "constant(c=0.5)"),
    ("constant 1/4", "ring", "atc", "constant(c=0.25)"),
    ("auto", "ring", "atc", "auto"),
    ("ada", "ada(k0=16, gamma=0.35, steps_per_epoch=25)", "atc", "plain"),
    ("ada_consensus 1/4, degree", "ring", "atc", "ada_consensus(constant(c=0.25), by=degree)"),
    ("ada_consensus 1/4, bytes", "ring", "atc", "ada_consensus(constant(c=0.25))"),
    ("plain one-peer ring", "one_peer_ring", "atc", "plain"),
    ("ada_consensus 1/4, one-peer", "one_peer_ring", "atc", "ada_consensus(constant(c=0.25))"),
    ("ada_consensus 1/4, one-peer, awc", "one_peer_ring", "awc", "constant(c=0.25)"),
    ("exact", "ring", "atc", "exact"),
]


def run(spec: RunSpec, control: str) -> dict[str, Any]:
    """Train once; return accuracy, bytes and how often the target was kept."""
    workload, batches = spec.make_workload(), Batches(spec, range(spec.workers))
    sim = Simulation(
        spec.make_model(),
        workload.loss,
        spec.make_optimizer,
        spec.workers,
        spec.base_schedule,
        algorithm=spec.algorithm,
        control=control,
        seed=spec.seed,
    )
    within: list[bool] = []
    distances: list[float] = []
    for epoch in range(spec.epochs):
        samples = batches.draw(epoch)
        for batch in range(spec.steps_per_epoch):
            set_lr(sim.optimizer, spec.lr_at(sim.num_steps))
            sim.step(*batches.fetch(samples[:, batch], sim.num_steps))
            # Under atc the distance is measured after mixing; under awc the next step mixes.
            distances.append(sim.consensus_distance())
            decided = sim.decision
            if spec.algorithm == "atc" and decided is not None and 0 < decided.target < math.inf:
                within.append(distances[-1] <= 1.1 * decided.target)
    return {
        "accuracy": workload.evaluate(sim.average().eval(), batches.data),
        "megabytes": float(sim.bytes_sent.mean()) / 1e6,
        "distance": statistics.fmean(distances),
        "held": statistics.fmean(within) if within else None,
        "controlled_steps": len(within),
    }


def main(
    workers: Annotated[int, typer.Option(help="Number of workers.")] = 32,
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
    epochs: Annotated[int, typer.Option(help="Epochs of 25 steps.")] = 40,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 0.2,
) -> None:
    """Compare controls on bytes and accuracy."""
    torch.set_num_threads(1)
    table: list[str] = []
    for name, topology, order, control in METHODS:
        results: list[dict[str, Any]] = []
        for seed in range(seeds):
            spec = RunSpec(
                workload="digits-mlp",
                workers=workers,
                topology=topology,
                algorithm=order,
                seed=seed,
                epochs=epochs,
                lr=lr,
                lr_schedule="steps",
                batch_size=4,
            )
            results.append(run(spec, control))
            print(json.dumps({"method": name, "seed": seed, **results[-1]}), flush=True)
        table.append(_row(name, results))
    print("| method | accuracy | MB per worker | mean Ξ | steps within 1.1 × target |")
    print("|---|---|---|---|---|")
    print("\n".join(table))


def _row(name: str, results: list[dict[str, Any]]) -> str:
    accuracies = [result["accuracy"] for result in results]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    held = [result["held"] for result in results if result["held"] is not None]
    steps = results[0]["controlled_steps"]
    return (
        f"| {name} | {statistics.fmean(accuracies):.3f} ± {spread:.3f} "
        f"| {statistics.fmean(r['megabytes'] for r in results):.1f} "
        f"| {statistics.fmean(r['distance'] for r in results):.3f} "
        f"| {f'{100 * statistics.fmean(held):.0f} % of {steps}' if held else '–'} |"
    )


if __name__ == "__main__":
    typer.run(main)
