"""A loop in the style of Hugging Face Accelerate with gossip; with --ddp, the same by DDP.

torchrun --nproc-per-node 2 examples/accelerate_prepare.py
"""

import contextlib
import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer.frameworks.accelerate import GossipAccelerator

EPOCHS, SEED = 15, 0

ddp = "--ddp" in sys.argv
kind = Accelerator if ddp else GossipAccelerator
accelerator = kind(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)

features, classes = load_digits(return_X_y=True)
images = torch.tensor(features / 16, dtype=torch.float32, device=accelerator.device)
labels = torch.tensor(classes, device=accelerator.device)
loader = DataLoader(TensorDataset(images[:1536], labels[:1536]), batch_size=16, shuffle=True)

torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader) // 2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for _ in range(EPOCHS):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state("out-accelerate/state")  # load_state() continues from it

averaged = accelerator.gossip.averaged() if isinstance(accelerator, GossipAccelerator) else None
with averaged or contextlib.nullcontext(), torch.no_grad():
    logits = model(images[1536:])
loss = nn.functional.cross_entropy(logits, labels[1536:])
accuracy = (logits.argmax(1) == labels[1536:]).float().mean().item()
accelerator.save_model(model, "out-accelerate/average")
accelerator.print(f"evaluation loss {loss:.4f}, test accuracy {accuracy:.3f}")
accelerator.end_training()
