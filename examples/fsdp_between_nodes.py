"""Train a GPT that FSDP shards over the ranks of a node, with gossip between two nodes.

torchrun --nproc-per-node 4 examples/fsdp_between_nodes.py
"""

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gossamer
from gossamer.workloads.models.transformer import GPT

NODES, STEPS, REPORT_EVERY, BATCH, CONTEXT = 2, 200, 50, 8, 64

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
shape = (NODES, world // NODES)  # here nodes are halves of one machine
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("between", "within"))

modules = sorted(Path(os.__file__).parent.glob("*.py"))
source = bytearray().join(path.read_bytes() for path in modules)
text = torch.frombuffer(source, dtype=torch.uint8).long()
train, test = text[:-100_000], text[-100_000:].unfold(0, CONTEXT + 1, CONTEXT)[:400]
own_text = train.tensor_split(world)[rank]
generator = torch.Generator().manual_seed(rank)

torch.manual_seed(0)
model = GPT(256, CONTEXT, width=64, layers=2, heads=4)  # a token is a byte
for block in model.blocks:
    fully_shard(block, mesh=mesh["within"])
fully_shard(model, mesh=mesh["within"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
gossip = gossamer.decentralize(model, optimizer, process_group=mesh["between"])


def loss_on(windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


for step in range(1, STEPS + 1):
    starts = torch.randint(len(own_text) - CONTEXT, (BATCH, 1), generator=generator)
    optimizer.zero_grad()
    loss_on(own_text[starts + torch.arange(CONTEXT + 1)]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the node's whole gradient
    optimizer.step()
    if step % REPORT_EVERY == 0:
        with gossip.averaged(), torch.no_grad():  # every rank: FSDP gathers shards
            bits = loss_on(test).item() / math.log(2)
        if rank == 0:
            print(f"step {step}: {bits:.2f} bits per byte of unseen source", flush=True)

gossip.finalize()  # from here on every node has the average
held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
whole = sum(parameter.numel() for parameter in model.parameters())
print(f"rank {rank} holds {held:,} of {whole:,} parameters", flush=True)
dist.destroy_process_group()
