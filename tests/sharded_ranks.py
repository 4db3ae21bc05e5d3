"""What ranks of a pool run with FSDP2 inside nodes of some ranks, and gossip between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gossamer
from gossamer import Simulation
from gossamer.errors import UserError
from gossamer.topology import Round, from_matrix
from tests.reference import ALL_OPTIMIZERS, batch, fill_, vector_of

NUM_NODES = 2
LAZY = from_matrix([[0.7, 0.3], [0.3, 0.7]])
"""Two workers that stay apart: every other graph of two averages exactly."""


def make_net() -> nn.Module:
    """Layers of 7, 4 and 3 rows: over two ranks uneven, over three the third has nothing of 4."""
    model = nn.Sequential(
        *(nn.Linear(5, 7), nn.Tanh()), nn.Sequential(nn.Linear(7, 4), nn.Tanh()), nn.Linear(4, 3)
    ).double()
    fill_(model)
    return model


@dataclass(frozen=True)
class Run:
    """One training run, on ranks or simulated."""

    algorithm: str = "awc"
    optimizer: str = "sgd_nesterov"
    topology: str | Round = LAZY
    clip_norm: float = 0.0
    control: str = "plain"
    num_steps: int = 6
    options: tuple[tuple[str, Any], ...] = ()


def nodes() -> DeviceMesh:
    """Two nodes, with all ranks that there are."""
    size = dist.get_world_size() // NUM_NODES
    return init_device_mesh("cpu", (NUM_NODES, size), mesh_dim_names=("between", "within"))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A part by itself, then the rest."""
    fully_shard(model.get_submodule("2"), mesh=mesh["within"])
    fully_shard(model, mesh=mesh["within"])
    return model


def whole(tensor: Any) -> Tensor:
    """Return all of a tensor; a collective within the node."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_vector(model: nn.Module) -> Tensor:
    """Return all parameters as one vector; a collective within the node."""
    return torch.cat([whole(p.detach()).flatten() for p in model.parameters()])


def start(run: Run, mesh: DeviceMesh) -> tuple[nn.Module, Any, gossamer.Gossip]:
    """Return a sharded model that gossips, and its optimizer; other nodes start elsewhere."""
    model = make_net()
    if mesh["between"].get_local_rank() > 0:  # the first node's parameters are everyone's start
        nn.init.constant_(model.get_parameter("0.weight"), 7.0)
    shard(model, mesh)
    optimizer = ALL_OPTIMIZERS[run.optimizer](model.parameters())
    gossip = gossamer.decentralize(
        model,
        optimizer,
        run.topology,
        process_group=mesh["between"],
        algorithm=run.algorithm,
        control=run.control,
        bucket_mb=2e-4,
        **dict(run.options),
    )
    return model, optimizer, gossip


def take_step(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    """The user's loop, with this rank's batch."""
    inputs, targets = batch(dist.get_rank(), step)
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    nn.functional.mse_loss(model(inputs), targets).backward()
    if run.clip_norm:
        nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm)
    optimizer.step()


def train(run: Run) -> dict[str, Any]:
    """Train on this rank; return what there is to compare."""
    model, optimizer, gossip = start(run, nodes())
    for step in range(run.num_steps):
        take_step(run, model, optimizer, step)
    distance = gossip.consensus_distance()
    sketches = gossip.sketches()
    before = whole_vector(model)
    with gossip.averaged():
        average = whole_vector(model)
        inputs, _ = batch(0, 0)
        with torch.no_grad():
            output = model(inputs)
    restored = torch.equal(whole_vector(model), before)
    state = {name: whole(tensor) for name, tensor in gossip.averaged_state_dict().items()}
    vector, norms = whole_vector(model), gossip.last_norms
    sent = gossip.bytes_sent
    gossip.finalize()
    return {
        "vector": vector,
        "distance": distance,
        "sketches": sketches,
        "average": average,
        "output": output,
        "restored": restored,
        "state": torch.cat([tensor.flatten() for tensor in state.values()]),
        "final": whole_vector(model),
        "norms": norms,
        "bytes": sent,
    }


def train_with_nan(run: Run) -> tuple[list[bool], dict[int, int]]:
    """Put a NaN into the last rank's shard after two steps; return what is finite after each."""
    model, optimizer, gossip = start(run, nodes())
    finite: list[bool] = []
    for step in range(run.num_steps):
        take_step(run, model, optimizer, step)
        if step == 1:
            with gossip.drained(keep_changes=True), torch.no_grad():
                if dist.get_rank() == dist.get_world_size() - 1:
                    local: Any = model.get_parameter("0.weight")
                    local.to_local()[0, 0] = float("nan")
        finite.append(bool(whole_vector(model).isfinite().all()))
    with pytest.raises(gossamer.gossip.NonFiniteError, match="got those of rank 1"):
        gossip.averaged_state_dict()
    gossip.close()
    return finite, dict(gossip.stats().left_out)


def train_scaled(run: Run) -> list[tuple[float, int]]:
    """Train with a GradScaler; the shard of one rank has an infinite gradient at step 1."""
    model, optimizer, gossip = start(run, nodes())
    scaler = gossamer.GradScaler(gossip, init_scale=4.0)
    seen: list[tuple[float, int]] = []
    for step in range(3):
        inputs, targets = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
        if step == 1 and dist.get_rank() == 2:
            gradient: Any = model.get_parameter("0.weight").grad
            gradient.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), gossip.num_steps))
    gossip.close()
    return seen


def evaluate_between_steps(run: Run) -> tuple[list[Tensor], Tensor]:
    """Evaluate where FSDP leaves the root whole: before an average, inside one, and before a step.

    Returns the outputs of the replica, the average and the replica again, and all parameters.
    """
    model, optimizer, gossip = start(run, nodes())
    inputs, _ = batch(0, 0)
    outputs: list[Tensor] = []
    for step in range(run.num_steps):
        take_step(run, model, optimizer, step)
        with torch.no_grad():
            before = model(inputs)
            with gossip.averaged():
                inside = model(inputs)
            outputs = [before, inside, model(inputs)]
    vector = whole_vector(model)
    gossip.close()
    return outputs, vector


def train_in_bfloat16() -> tuple[torch.dtype, float, bool]:
    """Compute in bfloat16 with shards in single precision."""
    mesh, model = nodes(), make_net().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["within"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    gossip = gossamer.decentralize(model, optimizer, process_group=mesh["between"])
    for step in range(3):
        inputs, targets = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs.bfloat16()).float(), targets.float()).backward()
        optimizer.step()
    distance = gossip.consensus_distance()
    gossip.finalize()
    vector = whole_vector(model)
    everyone = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, vector)
    return vector.dtype, distance, all(torch.equal(each, vector) for each in everyone)


def train_16_bits(optimizer: str) -> tuple[Tensor, Tensor]:
    """Train shards of 16-bit parameters, and return them beside those of a whole model."""
    mesh, shards, whole = nodes(), make_net().bfloat16(), make_net().bfloat16()
    fully_shard(shards, mesh=mesh["within"])
    for model in (shards, whole):
        trained = ALL_OPTIMIZERS[optimizer](model.parameters())
        gossamer.optim.tell_num_workers(trained, 4)
        for step in range(3):
            inputs, targets = batch(0, step)  # the same on all ranks
            trained.zero_grad()
            nn.functional.mse_loss(model(inputs.bfloat16()), targets.bfloat16()).backward()
            trained.step()
    return whole_vector(shards), vector_of(whole)


def states(model: nn.Module, optimizer: Any, gossip: gossamer.Gossip) -> dict[str, Any]:
    """Return all that a node saves, under a name of its own, as docs/fsdp.md has it."""
    own = {"gossip": gossip.state_dict()}
    own["model"], own["optimizer"] = get_state_dict(model, optimizer)
    return {f"node {gossip.rank}": own}


def save(run: Run, folder: str) -> Tensor:
    """Save in the middle of a run, and go on to its end."""
    model, optimizer, gossip = start(run, nodes())
    for step in range(run.num_steps):
        if step == run.num_steps // 2:
            state_dict_saver.save(states(model, optimizer, gossip), checkpoint_id=folder)
        take_step(run, model, optimizer, step)
    vector = whole_vector(model)
    gossip.close()
    return vector


def resume(run: Run, folder: str) -> Tensor:
    """Go on from the middle of a run that was saved."""
    model, optimizer, gossip = start(run, nodes())
    state = states(model, optimizer, gossip)
    with gossip.drained(keep_changes=True):
        state_dict_loader.load(state, checkpoint_id=folder)
        own = state[f"node {gossip.rank}"]
        set_state_dict(
            model, optimizer, model_state_dict=own["model"], optim_state_dict=own["optimizer"]
        )
        gossip.load_state_dict(own["gossip"])
    for step in range(gossip.num_steps, run.num_steps):
        take_step(run, model, optimizer, step)
    vector = whole_vector(model)
    gossip.close()
    return vector


def save_average(run: Run, folder: str) -> bool:
    """Save the average of all nodes; return whether another model loads it."""
    model, optimizer, gossip = start(run, nodes())
    for step in range(run.num_steps):
        take_step(run, model, optimizer, step)
    state_dict_saver.save({"model": gossip.averaged_state_dict()}, checkpoint_id=folder)
    gossip.finalize()
    other = shard(make_net(), nodes())
    state = {"model": other.state_dict()}
    state_dict_loader.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    return torch.equal(whole_vector(other), whole_vector(model))


def refusals() -> list[str]:
    """Return what is said about shards that cannot gossip, in an order that the test knows."""
    mesh = nodes()
    by_tensor = make_net()
    parallelize_module(by_tensor, mesh["within"], {"0": ColwiseParallel()})
    hybrid = make_net()
    fully_shard(hybrid, mesh=mesh)
    in_part = make_net()
    fully_shard(in_part.get_submodule("2"), mesh=mesh["within"])
    otherwise = make_net()
    by_column = mesh["between"].get_local_rank() == 1

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if by_column and parameter.shape == (3, 4) else None

    fully_shard(otherwise, mesh=mesh["within"], shard_placement_fn=placement)
    everywhere = shard(make_net(), mesh)
    one_differs = shard(make_net(), mesh)
    differs = dist.get_rank() == dist.get_world_size() - 1
    messages: list[str] = []
    for model, group, topology in (
        (by_tensor, mesh["between"], "ring"),
        (hybrid, mesh["between"], "ring"),
        (in_part, mesh["between"], "ring"),
        (otherwise, mesh["between"], "ring"),
        (everywhere, None, "ring"),
        (one_differs, mesh["between"], "ring" if differs else "complete"),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UserError) as caught:
            gossamer.decentralize(model, optimizer, topology, process_group=group)
        messages.append(str(caught.value))
    gossip = start(Run(), mesh)[2]
    with pytest.raises(UserError) as caught:
        gossamer.Checkpoints("nowhere", gossip, model=everywhere)
    messages.append(str(caught.value))
    gossip.close()
    return messages


def simulate(run: Run, ranks_per_node: int) -> Simulation:
    """The same run, where a worker is a node that has all batches of its ranks."""
    sim = Simulation(
        make_net(),
        nn.functional.mse_loss,
        ALL_OPTIMIZERS[run.optimizer],
        workers=NUM_NODES,
        topology=run.topology,
        algorithm=run.algorithm,
        control=run.control,
        clip_norm=run.clip_norm,
        dtype=torch.float64,
        gradients="loop",
        **dict(run.options),
    )
    for step in range(run.num_steps):
        of_nodes = [
            [batch(node * ranks_per_node + i, step) for i in range(ranks_per_node)]
            for node in range(NUM_NODES)
        ]
        inputs, targets = (
            torch.stack([torch.cat([pair[part] for pair in pairs]) for pairs in of_nodes])
            for part in (0, 1)
        )
        sim.step(inputs, targets)
    return sim


def vectors(sim: Simulation) -> list[Tensor]:
    """Return every worker's parameters."""
    return [vector_of(sim.worker(worker)) for worker in range(NUM_NODES)]
