"""Train a GPT with gossip in a loop of nanoGPT's shape; docs/nanogpt.md is how it came about.

torchrun --nproc-per-node 4 examples/nanogpt_gossip.py --max_iters=200
"""

import ast
import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer
from gossamer.workloads.models.transformer import GPT

out_dir, resume = "out", False
eval_interval, eval_iters = 100, 20
gradient_accumulation_steps = 8  # of all ranks together
batch_size, block_size, n_embd, n_layer, n_head = 4, 64, 64, 2, 4
learning_rate, min_lr, warmup_iters, max_iters = 3e-3, 3e-4, 20, 400
beta1, beta2, weight_decay, grad_clip = 0.9, 0.99, 0.1, 1.0
backend, compile, seed = "gloo", False, 0
topology, algorithm, smoothing = "one_peer_exponential", "awc", "auto"
for argument in sys.argv[1:]:  # such as --max_iters=100
    name, _, value = argument.removeprefix("--").partition("=")
    assert name in globals(), f"there is no setting {name}"
    globals()[name] = value
    with contextlib.suppress(ValueError, SyntaxError):  # a string
        globals()[name] = ast.literal_eval(value)

ddp = "RANK" in os.environ  # else one process, started without torchrun
if ddp:
    dist.init_process_group(backend)
rank, world_size = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
master_process = rank == 0
assert gradient_accumulation_steps % world_size == 0
gradient_accumulation_steps //= world_size
torch.set_num_threads(1)
Path(out_dir).mkdir(parents=True, exist_ok=True)

source = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
text = torch.frombuffer(bytearray(source[:2_200_000]), dtype=torch.uint8).long()
data = {"train": text[:2_000_000], "val": text[2_000_000:]}


def get_batch(split: str, *draw: int) -> tuple[Tensor, Tensor]:
    # The numbers say which batch, so that a resumed run goes on with the next one.
    generator = torch.Generator().manual_seed(hash((seed, split == "val", *draw)))
    starts = torch.randint(len(data[split]) - block_size, (batch_size, 1), generator=generator)
    windows = data[split][starts + torch.arange(block_size + 1)]
    return windows[:, :-1], windows[:, 1:]


torch.manual_seed(seed)
model: Any = GPT(256, block_size, width=n_embd, layers=n_layer, heads=n_head)  # of bytes
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [
    {"params": decayed, "weight_decay": weight_decay},
    {"params": others, "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))
optimizer = gossamer.optim.SmoothAdamW.like(optimizer, smoothing=smoothing)
if compile:
    model.compile()
gossip = gossamer.decentralize(model, optimizer, topology, algorithm=algorithm)
checkpoints = gossamer.Checkpoints(out_dir, gossip, model=model, optimizer=optimizer)

iter_num, best_val_loss = 0, float("inf")
if resume:
    checkpoint = torch.load(Path(out_dir, "ckpt.pt"))
    checkpoints.restore()
    iter_num, best_val_loss = gossip.num_steps, checkpoint["best_val_loss"]
raw_model = model


def loss_on(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    raw_model.eval()
    losses = {
        split: sum(loss_on(raw_model, *get_batch(split, k)).item() for k in range(eval_iters))
        for split in ("train", "val")
    }
    raw_model.train()
    return {split: loss / eval_iters for split, loss in losses.items()}


def evaluate() -> None:
    global best_val_loss
    losses = estimate_loss()
    print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
    if losses["val"] < best_val_loss:
        best_val_loss = losses["val"]
        checkpoint = {
            "model": raw_model.state_dict(),
            "iter_num": iter_num,
            "best_val_loss": best_val_loss,
        }
        torch.save(checkpoint, Path(out_dir, "ckpt.pt"))


def get_lr(step: int) -> float:
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    progress = (step - warmup_iters) / max(max_iters - warmup_iters, 1)
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (learning_rate - min_lr)


while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)

    if iter_num % eval_interval == 0:
        checkpoints.save()
        with gossip.averaged():
            if master_process:
                evaluate()
    if iter_num >= max_iters:
        break

    for micro_step in range(gradient_accumulation_steps):
        batch = get_batch("train", rank, iter_num, micro_step)
        (loss_on(model, *batch) / gradient_accumulation_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1

gossip.close()
if ddp:
    dist.destroy_process_group()
