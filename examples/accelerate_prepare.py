"""A loop in the style of Hugging Face Accelerate, with gossip in the place of its DDP.

torchrun --nproc-per-node 2 examples/accelerate_prepare.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer

EPOCHS = 15

accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)

features, classes = load_digits(return_X_y=True)
images = torch.tensor(features / 16, dtype=torch.float32, device=accelerator.device)
labels = torch.tensor(classes, device=accelerator.device)
loader = DataLoader(TensorDataset(images[:1536], labels[:1536]), batch_size=16, shuffle=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader) // 2)

# evaluation_mode leaves out the wrapper DDP, and nothing else that training needs.
model = accelerator.prepare_model(model, evaluation_mode=True)
gossip = gossamer.decentralize(model, optimizer)
optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)

for epoch in range(EPOCHS):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    distance = gossip.consensus_distance()
    accelerator.print(f"epoch {epoch}: workers are {distance:.3f} apart")

with gossip.averaged(), torch.no_grad():
    accuracy = (model(images[1536:]).argmax(1) == labels[1536:]).float().mean().item()
accelerator.print(f"test accuracy {accuracy:.3f} after {gossip.num_steps} steps")
gossip.close()
accelerator.end_training()
