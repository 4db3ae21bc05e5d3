"""Runs on each host: every method in turn, each in its own forked process.

Every rank trains on its own samples. At intervals the clock stops, and a copy of the mean of all
replicas is evaluated. An exchange in flight is not interrupted and completes meanwhile, so methods
that overlap get one exchange per interval for free. DDP trains for a number of steps; others until
they reach its final loss, or for a multiple of its steps. Points are printed to stdout as lines,
and a line at the end of each method.
"""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from ctypes import c_double
from dataclasses import asdict, dataclass, field
from multiprocessing.sharedctypes import Synchronized
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.race.methods import METHODS, REFERENCE, Loss
from gossamer import workloads
from gossamer.lab.compute import Pace, SleepLayer
from gossamer.workloads.models.transformer import GPT

POINT, END = "point:", "end:"
_FIRST_PORT = 31000
_CONTEXT = 64
"""Bytes of a sample."""

_TESTS = 64
"""Test samples of an evaluation."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The training task, the same on all hosts."""

    methods: list[str]
    workload: str
    width: int
    """Width of a two-layer transformer on the same bytes; 0 for the workload's own model."""

    steps: int
    """Of DDP."""

    most_steps: int
    """Of the others."""

    target: float | None
    """DDP's final loss, if known."""

    evaluate_every: int
    batch: int
    lr: float
    compute_ms: float
    """Emulated compute of a step, in addition to the real one."""

    seed: int
    timeout_s: float
    lrs: dict[str, float] = field(default_factory=dict[str, float])
    """The learning rates of methods that do not take ``lr``."""

    def lr_of(self, method: str) -> float:
        """Return the learning rate of a method."""
        return self.lrs.get(method, self.lr)

    def to_json(self) -> str:
        """Return it as one argument of a command."""
        return json.dumps(asdict(self))


def race(task: Task, method: str, rank: int, size: int, target: Synchronized[c_double]) -> None:
    """Train with one method, and print the loss of the mean replica.

    Args:
        task: what is trained.
        method: its name.
        rank: of this host.
        size: number of hosts.
        target: DDP's final loss, shared by the methods' processes; DDP writes it unless the task
            has one.
    """
    leads = method == REFERENCE
    steps = task.steps if leads else task.most_steps
    workload = workloads.find(task.workload)
    data = workload.load()
    torch.manual_seed(task.seed)
    model = make_model(task.width) if task.width else workload.make_model()
    judged = copy.deepcopy(model)
    with_emulated_compute(model, task.compute_ms / 1e3)
    step = METHODS[method](model, workload.loss, task.lr_of(method))
    dice = torch.Generator().manual_seed(1000 * task.seed + rank)
    seconds = 0.0
    for done in range(steps + 1):
        if done % task.evaluate_every == 0 or done == steps:
            found = evaluate(judged, model, workload.loss, data, size)
            if done == steps and leads and task.target is None:
                target.value = found  # pyright: ignore[reportAttributeAccessIssue]
            if rank == 0:
                point = {"method": method, "step": done, "seconds": seconds, "loss": found}
                print(POINT + json.dumps(point), flush=True)
            if done == steps or (not leads and found <= float(target.value)):
                return
        chosen = torch.randint(len(data.train_inputs), (task.batch,), generator=dice)
        inputs, targets = data.train_inputs[chosen], data.train_targets[chosen]
        start = time.perf_counter()
        step(inputs, targets)
        seconds += time.perf_counter() - start


def make_model(width: int) -> nn.Module:
    """Return a transformer on bytes that is larger than stdlib-gpt's."""
    return GPT(256, _CONTEXT, width=width, layers=2, heads=4)


def with_emulated_compute(model: nn.Module, seconds: float) -> None:
    """Add a sleep to each block: its share of the compute time of a larger batch."""
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList), "a transformer of blocks"
    share_s, pace = seconds / len(blocks), Pace(0.0, 0)
    for block in blocks:
        sleep = SleepLayer(share_s / 3, 2 * share_s / 3, pace)
        block.register_forward_hook(lambda module, inputs, output, sleep=sleep: sleep(output))


@torch.no_grad()
def evaluate(
    judged: nn.Module, model: nn.Module, loss: Loss, data: workloads.Data, size: int
) -> float:
    """Return the loss of the mean of all replicas, on test samples."""
    dist.barrier()
    for mean, own in zip(judged.parameters(), model.parameters(), strict=True):
        mean.copy_(own)
        dist.all_reduce(mean)
        mean.div_(size)
    tests = torch.arange(_TESTS)
    found = loss(judged(data.test_inputs[tests]), data.test_targets[tests])
    dist.broadcast(found, 0)  # all stop at the same step
    return float(found)


def _child(task: Task, method: str, port: int, target: Synchronized[c_double]) -> None:
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    try:
        race(task, method, dist.get_rank(), dist.get_world_size(), target)
        dist.barrier()
        if dist.get_rank() == 0:
            print(END + json.dumps(method))
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)  # not destroyed: a peer may still be sending


def main() -> None:
    """Race the task given as JSON in the first argument."""
    task = Task(**json.loads(sys.argv[1]))
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports the compiler, for 1.6 s
    workloads.find(task.workload).load()
    fork = multiprocessing.get_context("fork")
    target = fork.Value(c_double, -math.inf if task.target is None else task.target)
    for port, method in enumerate(task.methods, start=_FIRST_PORT):
        child = fork.Process(target=_child, args=(task, method, port, target))
        child.start()
        child.join(task.timeout_s)
        if child.is_alive():
            child.kill()
            child.join()


if __name__ == "__main__":
    main()
