"""What ranks of a pool run with DDP inside nodes of some ranks, each of which sends its slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.errors import UserError
from gossamer.gossip import NonFiniteError
from tests.reference import ALL_OPTIMIZERS, batch, vector_of
from tests.sharded_ranks import Run, make_net, nodes, shard


def start(run: Run, *, sliced: bool = True, normalized: bool = False) -> tuple[Any, Any, Any]:
    """Return a wrapped model that gossips, its optimizer and the gossip."""
    mesh, model = nodes(), make_net()
    if normalized:
        model = nn.Sequential(nn.BatchNorm1d(5, dtype=torch.float64), model)
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("within"))
    optimizer = ALL_OPTIMIZERS[run.optimizer](model.parameters())
    gossip = gossamer.decentralize(
        ddp,
        optimizer,
        run.topology,
        process_group=mesh["between"],
        within=mesh["within"] if sliced else None,
        algorithm=run.algorithm,
        control=run.control,
        bucket_mb=2e-4,
        **dict(run.options),
    )
    return ddp, optimizer, gossip


def take_step(run: Run, ddp: nn.Module, optimizer: Any, step: int) -> None:
    """The user's loop, with this rank's batch."""
    inputs, targets = batch(dist.get_rank(), step)
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp(inputs), targets).backward()
    if run.clip_norm:
        nn.utils.clip_grad_norm_(ddp.parameters(), run.clip_norm)
    optimizer.step()


def train(run: Run, sliced: bool) -> dict[str, Any]:
    """Train on this rank; return what there is to compare."""
    ddp, optimizer, gossip = start(run, sliced=sliced)
    after: list[Tensor] = []
    for step in range(run.num_steps):
        take_step(run, ddp, optimizer, step)
        after.append(vector_of(ddp))
    with gossip.drained():
        sent, messages = gossip.bytes_sent, gossip.messages_sent
    distance, sketches = gossip.consensus_distance(), gossip.sketches()
    with gossip.averaged():
        average = vector_of(ddp)
    restored = torch.equal(vector_of(ddp), after[-1])
    gossip.finalize()
    return {
        "after": after,
        "bytes": sent,
        "messages": messages,
        "distance": distance,
        "sketches": sketches,
        "average": average,
        "restored": restored,
        "final": vector_of(ddp),
    }


def train_with_nan() -> tuple[bool, dict[int, int]]:
    """The last node's parameters get a NaN in one place, which is in one rank's slice."""
    run = Run(options=(("nonfinite_rounds", 0),))
    ddp, optimizer, gossip = start(run)
    for step in range(4):
        take_step(run, ddp, optimizer, step)
        if step == 1:
            with gossip.drained(keep_changes=True), torch.no_grad():
                if gossip.rank == 1:
                    ddp.module[0].weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="got those of rank 1"):
        gossip.averaged_state_dict()
    gossip.close()
    return bool(vector_of(ddp).isfinite().all()), dict(gossip.stats().left_out)


def average_statistics() -> tuple[Tensor, Tensor]:
    """Return this rank's running mean, and the one of the average."""
    run = Run()
    ddp, optimizer, gossip = start(run, normalized=True)
    for step in range(2):
        take_step(run, ddp, optimizer, step)
    own = ddp.module[0].running_mean.clone()
    gossip.finalize()
    return own, ddp.module[0].running_mean


def save_and_resume(run: Run, folder: str) -> bool:
    """Save in the middle, in a folder for each place; return whether another run ends alike."""
    vectors: list[Tensor] = []
    place = dist.get_rank() % (dist.get_world_size() // 2)
    for _ in range(2):
        ddp, optimizer, gossip = start(run)
        objects = {"model": ddp.module, "optimizer": optimizer}
        checkpoints = gossamer.Checkpoints(f"{folder}/{place}", gossip, **objects)
        checkpoints.restore()
        for step in range(gossip.num_steps, run.num_steps):
            if step == run.num_steps // 2 and not vectors:
                checkpoints.save()
            take_step(run, ddp, optimizer, step)
        vectors.append(vector_of(ddp))
        gossip.close()
    return torch.equal(*vectors)


def interrupt_one(folder: str) -> int:
    """Interrupt the last rank alone after three steps; return when this rank stops."""
    run = Run()
    ddp, optimizer, gossip = start(run)
    place = dist.get_rank() % (dist.get_world_size() // 2)
    checkpoints = gossamer.Checkpoints(
        f"{folder}/{place}", gossip, check_every=2, model=ddp.module, optimizer=optimizer
    )
    while not checkpoints.interrupted() and gossip.num_steps < 20:
        take_step(run, ddp, optimizer, gossip.num_steps)
        if gossip.num_steps == 3 and dist.get_rank() == dist.get_world_size() - 1:
            checkpoints.interrupt()
    gossip.close()
    return gossip.num_steps


def refusals() -> list[str]:
    """Return what is said about ranks that cannot share a replica, in an order that tests know."""
    mesh = nodes()
    different = DistributedDataParallel(make_net(), process_group=mesh.get_group("within"))
    if dist.get_rank() == 3:
        nn.init.zeros_(different.module.get_parameter("2.0.bias"))
    elsewhere = DistributedDataParallel(make_net(), process_group=mesh.get_group("between"))
    messages: list[str] = []
    for model, between, within in (
        (different, mesh["between"], mesh["within"]),
        (make_net(), mesh["between"], mesh["within"]),
        (elsewhere.module, mesh["between"], mesh["within"]),
        (different, mesh["within"], mesh["within"]),
        (different, mesh["between"], mesh),
        (shard(make_net(), mesh), mesh["between"], mesh["within"]),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises((UserError, gossamer.gossip.ExchangeError)) as caught:
            gossamer.decentralize(model, optimizer, process_group=between, within=within)
        messages.append(str(caught.value))
    return messages
