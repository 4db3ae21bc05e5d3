"""Train a GPT on the source of Python's own modules with gossip, and let it write.

torchrun --nproc-per-node 4 examples/gpt.py
"""

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.workloads.models.transformer import GPT

STEPS, REPORT_EVERY, BATCH, CONTEXT = 400, 100, 8, 64

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

modules = sorted(Path(os.__file__).parent.glob("*.py"))
source = bytearray().join(path.read_bytes() for path in modules)
text = torch.frombuffer(source, dtype=torch.uint8).long()
train, test = text[:-100_000], text[-100_000:].unfold(0, CONTEXT + 1, CONTEXT)[:400]
shard = train.tensor_split(world)[rank]  # every worker reads modules of its own
generator = torch.Generator().manual_seed(rank)

torch.manual_seed(0)
model = GPT(256, CONTEXT, width=64, layers=2, heads=4)  # a token is a byte
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS, pct_start=0.1)
gossip = gossamer.decentralize(model, optimizer, topology="one_peer_exponential")


def loss_on(windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def write(prompt: str, length: int) -> str:
    written = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        likely = model(written[:, -CONTEXT:])[0, -1].div(0.7).softmax(0)
        written = torch.cat((written, likely.multinomial(1)[None]), 1)
    return bytes(written[0].tolist()).decode(errors="replace")


for step in range(1, STEPS + 1):
    starts = torch.randint(len(shard) - CONTEXT, (BATCH, 1), generator=generator)
    optimizer.zero_grad()
    loss_on(shard[starts + torch.arange(CONTEXT + 1)]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % REPORT_EVERY == 0:
        with gossip.averaged(), torch.no_grad():
            bits = loss_on(test).item() / math.log(2)
        if rank == 0:
            print(f"step {step}: {bits:.2f} bits per byte of unseen source", flush=True)

gossip.finalize()  # from here on every worker has the average
if rank == 0:
    print(write("def ", 300))
dist.destroy_process_group()
