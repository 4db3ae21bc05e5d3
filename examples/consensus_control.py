"""Keep workers close: a plain ring against controlled ones, on shards that differ.

python examples/consensus_control.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import gossamer

WORKERS, BATCH, STEPS = 16, 8, 300
CONTROLS = {
    "plain": "a ring, one round per step",
    "constant(c=0.25)": "rounds until a quarter of the plain ring's distance is left",
    "ada_consensus(constant(c=0.25))": "an all-reduce where the ring does not get that far",
    "exact": "an all-reduce at every step",
}

features, classes = load_digits(return_X_y=True)
images, labels = torch.tensor(features / 16, dtype=torch.float32), torch.tensor(classes)
shards = labels[:1500].argsort().tensor_split(WORKERS)  # by class: one or two digits for each


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        right = model(images[1500:]).argmax(1) == labels[1500:]
    return right.float().mean().item()


print(f"{'accuracy: average':>17} {'worst worker':>13} {'mean distance':>14} {'MB sent':>8}")
for control, meaning in CONTROLS.items():
    torch.manual_seed(0)
    sim = gossamer.Simulation(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        WORKERS,
        topology="ring",
        order="atc",
        control=control,
    )
    distances: list[float] = []
    for _ in range(STEPS):
        rows = torch.stack([shard[torch.randint(len(shard), (BATCH,))] for shard in shards])
        sim.step(images[rows], labels[rows])
        distances.append(sim.consensus_distance())
    worst = min(accuracy(sim.worker(worker)) for worker in range(WORKERS))
    distance, megabytes = sum(distances) / STEPS, sim.bytes_sent.mean() / 1e6
    row = f"{accuracy(sim.average()):17.3f} {worst:13.3f} {distance:14.3f} {megabytes:8.1f}"
    print(f"{row}  {control}: {meaning}")
