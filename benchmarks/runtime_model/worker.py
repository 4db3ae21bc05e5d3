"""Runs on each host: the methods of benchmarks.cluster, and one that writes a profile."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from torch import nn

from benchmarks.cluster.methods import METHODS, Step, Workers, adam, gossip, training_step
from benchmarks.cluster.worker import WARMUP, main
from gossamer.lab.compute import EmulatedModel
from gossamer.runtime_model.measure import measure

PROFILE = "profile"
AER = "gossamer(aer)"
FOLDER, STEPS = "GOSSAMER_PROFILES", "GOSSAMER_PROFILE_STEPS"


def aer_of(workers_per_node: int) -> str:
    """Return AER on the nodes of the layout; if each host is a node, on pairs of hosts."""
    return f"aer(workers_per_node={max(2, workers_per_node)})"


def profiled(model: nn.Module, workers: Workers) -> Step:
    """Local training with a profile."""
    assert isinstance(model, EmulatedModel)
    # Other random compute times than those of the methods: a prediction must not know them.
    for _ in range(1000):
        model.pace.advance()
    optimizer = adam(model.parameters())
    steps = int(os.environ[STEPS])
    # One file per round, named by its port.
    path = Path(os.environ[FOLDER]) / f"{os.environ['MASTER_PORT']}.json"
    measure(model, optimizer, path, steps=steps, warmup=WARMUP, name="emulated")
    return training_step(model, optimizer, workers.batch)


if __name__ == "__main__":
    METHODS[PROFILE] = profiled
    METHODS[AER] = partial(gossip, topology=aer_of(int(os.environ["LOCAL_WORLD_SIZE"])))
    main()
