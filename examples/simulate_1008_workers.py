"""Train on real handwritten digits with 1008 virtual workers, on four graphs and centrally.

python examples/simulate_1008_workers.py
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gossamer
from gossamer.simulate import Centralized

WORKERS, BATCH, STEPS = 1008, 8, 60
GRAPHS = (
    "ring",
    "exponential",
    "ada(k0=112, gamma=20, steps_per_epoch=10)",
    "complete",
)

features, classes = load_digits(return_X_y=True)
images = torch.tensor(features / 16, dtype=torch.float32)
labels = torch.tensor(classes)
train_images, train_labels = images[:1500], labels[:1500]
test_images, test_labels = images[1500:], labels[1500:]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return (model(test_images).argmax(1) == test_labels).float().mean().item()


def batches() -> list[tuple[Tensor, Tensor]]:
    # Worker i sees the digits 2k and 2k + 1 only, with k = i mod 5: alone it would not learn more.
    generator = torch.Generator().manual_seed(0)
    pools = [torch.nonzero(train_labels // 2 == k).flatten() for k in range(5)]
    result: list[tuple[Tensor, Tensor]] = []
    for _ in range(STEPS):
        rows = torch.stack(
            [
                pools[w % 5][torch.randint(len(pools[w % 5]), (BATCH,), generator=generator)]
                for w in range(WORKERS)
            ]
        )
        result.append((train_images[rows], train_labels[rows]))
    return result


data = batches()
loss = nn.functional.cross_entropy
print(f"{'graph':42} {'average':>8} {'worker 0':>9} {'consensus distance':>19} {'seconds':>8}")
for graph in GRAPHS:
    start = time.perf_counter()
    sim = gossamer.Simulation(make_model(), loss, make_optimizer, WORKERS, graph, "atc")
    for inputs, targets in data:
        sim.step(inputs, targets)
    seconds = time.perf_counter() - start
    average, first = accuracy(sim.average()), accuracy(sim.worker(0))
    print(f"{graph:42} {average:8.3f} {first:9.3f} {sim.consensus_distance():19.3g} {seconds:8.1f}")

start = time.perf_counter()
central = Centralized(make_model(), loss, make_optimizer, WORKERS)
for inputs, targets in data:
    central.step(inputs, targets)
seconds = time.perf_counter() - start
print(f"{'centralized':42} {accuracy(central.average()):8.3f} {'':9} {0:19.3g} {seconds:8.1f}")
