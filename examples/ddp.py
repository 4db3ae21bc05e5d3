"""Train on real handwritten digits with DistributedDataParallel.

torchrun --nproc-per-node 4 examples/ddp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 8

torch.set_num_threads(1)
dist.init_process_group("gloo")

features, classes = load_digits(return_X_y=True)
images = torch.tensor(features / 16, dtype=torch.float32).view(-1, 1, 8, 8)
labels = torch.tensor(classes)
train, test = TensorDataset(images[:1500], labels[:1500]), (images[1500:], labels[1500:])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 64, kernel_size=3, padding=1), nn.ReLU()),
    *(nn.Conv2d(64, 128, kernel_size=3, padding=1), nn.ReLU()),
    *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128 * 4 * 4, 10)),
)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scheduler.step()

with torch.no_grad():
    accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
if dist.get_rank() == 0:
    print(f"test accuracy {accuracy:.3f}")
dist.destroy_process_group()
