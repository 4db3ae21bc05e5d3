"""Digests of trained parameters: run `python -m benchmarks.bits` before and after a change.

One line per case: its name, and a digest of every worker's parameters after a few steps. A change
that should not alter numbers leaves all lines unchanged, on one machine with one version of torch.
Simulations and ranks (threads over Gloo, and processes under torchrun) are cases.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gossamer import Simulation, decentralize
from gossamer.engine import RunSpec, run
from gossamer.simulate import Centralized, worker_seed
from tests.catalogue import ALL_TOPOLOGIES
from tests.ranks import run_ranks
from tests.reference import ALL_OPTIMIZERS, ORDERS
from tests.tasks import ALL_TASKS, Task, batches, tokens, transformer

NUM_STEPS = 30
NUM_WORKERS = 8
CONTROLS = {
    "awc": ["ada_consensus(constant(c=0.25), by=degree)", "auto", "gamma(p=0.5)", "critical"],
    "atc": [
        "constant(c=0.25)",
        "adaptive(s=0.01)",
        "critical(share=0.5)",
        "phases(exact, constant(c=0.5), plain, at=(5, 20))",
        "phases(plain, constant(c=0.5), adaptive(s=0.01))",
        "repeat(constant(c=0.1), q_max=4, interval=3)",
    ],
}
TASKS = {**ALL_TASKS, "dropout": Task(partial(transformer, 0.3), tokens)}


def main() -> None:
    """Print one line per case."""
    torch.set_num_threads(1)
    for name, vectors in itertools.chain(_simulations(), _ranks(), _records()):
        print(f"{name}: {_digest(vectors)}", flush=True)


def _simulations() -> Iterator[tuple[str, Iterable[Tensor]]]:
    for (name, task), gradients in itertools.product(TASKS.items(), ("vmap", "loop")):
        yield f"simulation {name} {gradients}", _simulate(task, gradients=gradients)
        yield f"centralized {name} {gradients}", _centralize(task, gradients)
    mlp, convnet = TASKS["mlp"], TASKS["convnet"]
    for topology, order in itertools.product(ALL_TOPOLOGIES, ORDERS):
        yield f"simulation {topology} {order}", _simulate(mlp, topology=topology, order=order)
    for optimizer, order in itertools.product(ALL_OPTIMIZERS, ORDERS):
        yield f"simulation {optimizer} {order}", _simulate(mlp, optimizer=optimizer, order=order)
    for order, controls in CONTROLS.items():
        for control in controls:
            steps = _simulate(mlp, topology="ring", order=order, control=control)
            yield f"simulation {control} {order}", steps
        yield f"simulation mixed buffers {order}", _simulate(convnet, order=order, buffers="mix")


def _ranks() -> Iterator[tuple[str, Iterable[Tensor]]]:
    for topology, order in itertools.product(ALL_TOPOLOGIES, ORDERS):
        yield f"ranks {topology} {order}", _train_ranks(topology, order, "plain")
    for order, controls in CONTROLS.items():
        for control in controls:
            yield f"ranks {control} {order}", _train_ranks("ring", order, control)


def _records() -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Records of both engines, without their times."""
    for engine, topology in itertools.product(
        ("distributed", "simulated"), ("ring", "centralized")
    ):
        spec = RunSpec(
            workload="quadratic",
            workers=2,
            topology=topology,
            engine=engine,
            log_every=1,
            epochs=1,
            steps_per_epoch=10,
        )
        records = [record.model_dump(exclude={"train_s"}) for record in run(spec)]
        text = "".join(str(record) for record in records if record["kind"] != "started")
        name = f"records {topology}" if engine == "distributed" else f"records {topology} {engine}"
        yield name, [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)]


def _simulate(
    task: Task,
    *,
    topology: str = "one_peer_exponential",
    order: str = "awc",
    control: str = "plain",
    optimizer: str = "sgd_nesterov",
    gradients: str = "vmap",
    buffers: str = "average",
) -> Iterable[Tensor]:
    sim = Simulation(
        task.make(),
        task.loss,
        ALL_OPTIMIZERS[optimizer],
        NUM_WORKERS,
        topology,
        order,
        control=control,
        gradients=gradients,
        buffers=buffers,
    )
    for step in range(NUM_STEPS):
        _set_lr(sim.optimizer, step)
        sim.step(*batches(task, NUM_WORKERS, step))
    return [*sim.parameters.values(), *sim.average().buffers()]


def _centralize(task: Task, gradients: str) -> Iterable[Tensor]:
    make = ALL_OPTIMIZERS["sgd_nesterov"]
    central = Centralized(task.make(), task.loss, make, NUM_WORKERS, gradients=gradients)
    for step in range(NUM_STEPS):
        central.step(*batches(task, NUM_WORKERS, step))
    return [*central.parameters.values(), *central.average().buffers()]


def _train_ranks(topology: str, order: str, control: str) -> Iterable[Tensor]:
    train: Callable[[ProcessGroup], list[Tensor]] = partial(
        _train_rank, topology=topology, order=order, control=control
    )
    return itertools.chain.from_iterable(run_ranks(NUM_WORKERS, train))


def _train_rank(group: ProcessGroup, *, topology: str, order: str, control: str) -> list[Tensor]:
    task = TASKS["mlp"]
    model: nn.Module = task.make().float()
    optimizer = ALL_OPTIMIZERS["sgd_nesterov"](model.parameters())
    gossip = decentralize(
        model, optimizer, topology, process_group=group, order=order, control=control
    )
    for step in range(NUM_STEPS):
        _set_lr(optimizer, step)
        inputs, targets = task.batch(group.rank(), step)
        optimizer.zero_grad()
        torch.manual_seed(worker_seed(0, group.rank(), step))
        task.loss(model(inputs.float()), targets).backward()
        optimizer.step()
    gossip.close()
    return [p.detach() for p in model.parameters()]


def _set_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Reduce the rate to a tenth at two thirds of training, where a phase of controls starts."""
    for group in optimizer.param_groups:
        group["lr"] = 0.05 if step < 2 * NUM_STEPS // 3 else 0.005


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
