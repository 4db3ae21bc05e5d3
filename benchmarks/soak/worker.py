"""One worker of a soak: it trains a workload, and writes every step to a file."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

import gossamer
from gossamer.files import write_atomic
from gossamer.optim import AccumAdamW
from gossamer.workloads import WORKLOADS, Data


@dataclass(frozen=True)
class Spec:
    """The settings of all workers of a job."""

    workload: str = "digits-mlp"
    num_workers: int = 4
    topology: str = "one_peer_exponential"
    seed: int = 0
    num_steps: int = 0
    """0 to train until the step in the file ``until``."""

    lr: float = 0.0
    """0 for the workload's own."""

    constant_lr: bool = False
    """Whether the learning rate is constant, as it is if the number of steps is not known."""

    pace_s: float = 0.0
    """How long a step sleeps, to emulate computation on another processor."""

    timeout_s: float = 5.0
    slow_from: int = 0
    """From this step on, steps are slower while a worker is missing, to let it join in time."""


_WAITING_S = 0.25
"""Duration of such a slower step."""


def train(spec: Spec, folder: Path) -> None:
    """Train until the last step, whatever happens to other workers."""
    torch.set_num_threads(1)
    workload = WORKLOADS[spec.workload]()
    data = workload.load()
    dist.init_process_group("gloo")
    _wait_for_all(spec)
    torch.manual_seed(spec.seed)
    model = workload.make_model()
    optimizer = _optimizer(spec, model.parameters())
    gossip = gossamer.decentralize(
        model,
        optimizer,
        spec.topology,
        on_failure="continue",
        timeout=timedelta(seconds=spec.timeout_s),
    )
    worker = gossip.members[gossip.rank]
    with (folder / f"{worker}.steps").open("a", buffering=1) as file:
        while not _is_over(spec, gossip.num_steps, folder):
            waits = spec.slow_from and gossip.num_steps >= spec.slow_from
            waits = waits and gossip.num_workers < spec.num_workers
            time.sleep(_WAITING_S if waits else spec.pace_s)
            if spec.num_steps and not spec.constant_lr:
                for group in optimizer.param_groups:
                    group["lr"] = _lr(spec) * _share_of_lr(gossip.num_steps, spec)
            inputs, targets = _batch(spec, data, worker, gossip.num_steps)
            optimizer.zero_grad()
            workload.loss(model(inputs), targets).backward()
            optimizer.step()
            _note(file, gossip)
    gossip.finalize()
    model.eval()
    answer = {
        "members": gossip.members,
        "num_steps": gossip.num_steps,
        "metric": workload.evaluate(model, data),
        "failures": gossip.stats().failures,
    }
    write_atomic(folder / f"{worker}.json", lambda aside: aside.write_text(json.dumps(answer)))


def _wait_for_all(spec: Spec) -> None:
    """Wait until all processes have started once: the timeout is for training."""
    group = dist.group.WORLD
    assert group is not None
    store = group.get_group_store()
    store.set(f"started/{dist.get_rank()}", "")
    store.wait([f"started/{rank}" for rank in range(spec.num_workers)], timedelta(minutes=10))


def _is_over(spec: Spec, num_steps: int, folder: Path) -> bool:
    if spec.num_steps:
        return num_steps >= spec.num_steps
    until = folder / "until"
    return until.exists() and num_steps >= int(until.read_text())


def _optimizer(spec: Spec, parameters: object) -> Optimizer:
    recipe = WORKLOADS[spec.workload]().recipe
    make = {"sgd": SGD, "adamw": AccumAdamW}[recipe.optimizer]
    return make(parameters, lr=_lr(spec), **recipe.optimizer_options)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _lr(spec: Spec) -> float:
    return spec.lr or WORKLOADS[spec.workload]().recipe.lr


def _share_of_lr(step: int, spec: Spec) -> float:
    """Return a linear warm-up over a twentieth of all steps, times a cosine."""
    done = step / spec.num_steps
    return min(done / 0.05, 1.0) * (1 + np.cos(np.pi * done)) / 2


def _batch(spec: Spec, data: Data, worker: int, step: int) -> tuple[Tensor, Tensor]:
    """Return a worker's samples of a step, from its own part of the data, whatever the members."""
    size = WORKLOADS[spec.workload]().recipe.batch_size
    share = len(data.train_targets) // spec.num_workers
    generator = np.random.default_rng((spec.seed, worker, step))
    chosen = torch.from_numpy(generator.integers(share, size=size) * spec.num_workers + worker)
    return data.train_inputs[chosen], data.train_targets[chosen]


def _note(file: TextIO, gossip: gossamer.Gossip) -> None:
    members = ",".join(map(str, gossip.members))
    file.write(f"{time.time()} {gossip.num_steps} {members}\n")


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # First of all: a fault may be meant for a process that is still starting.
    rank = os.environ["RANK"]
    write_atomic(folder / f"{rank}.pid", lambda aside: aside.write_text(str(os.getpid())))
    train(Spec(**json.loads((folder / "spec.json").read_text())), folder)


if __name__ == "__main__":
    main()
