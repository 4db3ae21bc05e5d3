"""Communication graphs of your own: four racks of four workers, with slow links between racks.

python examples/custom_topology.py
"""

import networkx as nx
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import gossamer
from gossamer.topology import Round, Schedule, from_matrix, from_networkx, parse, ring, static
from gossamer.topology.spectrum import mixing_rate

RACKS, SIZE, BATCH, STEPS = 4, 4, 16, 300
WORKERS = RACKS * SIZE

# A round from a graph of networkx: racks are cliques, joined to a ring by one edge each.
cliques = from_networkx(nx.connected_caveman_graph(RACKS, SIZE))

# Rounds from matrices: the average of each rack, and a ring through the racks for each place.
within = from_matrix(np.kron(np.eye(RACKS), np.full((SIZE, SIZE), 1 / SIZE)))
across = from_matrix(np.kron(ring(RACKS).matrix().toarray(), np.eye(SIZE)))


# A schedule is a function from the step to a round. This one repeats after four steps.
def mostly_within(step: int) -> Round:
    return across if step == 3 else within


schedules = {
    "ring": parse("ring", WORKERS),
    "exponential": parse("exponential", WORKERS),
    "cliques": static(cliques),
    "mostly within": Schedule(WORKERS, period=4, build=mostly_within),
}


def copies_between_racks(schedule: Schedule) -> float:
    rack = np.arange(WORKERS) // SIZE
    pairs = [schedule.round(step).matrix().nonzero() for step in range(4)]
    return float(np.mean([(rack[to] != rack[sender]).sum() for to, sender in pairs]))


features, classes = load_digits(return_X_y=True)
images, labels = torch.tensor(features / 16, dtype=torch.float32), torch.tensor(classes)
shards = labels[:1500].argsort().tensor_split(WORKERS)  # by class: no worker sees all digits

print(f"{'schedule':15} {'p':>6} {'copies between racks':>21} {'distance':>9} {'accuracy':>9}")
for name, schedule in schedules.items():
    torch.manual_seed(0)
    sim = gossamer.Simulation(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        WORKERS,
        schedule,
    )
    for _ in range(STEPS):
        rows = torch.stack([shard[torch.randint(len(shard), (BATCH,))] for shard in shards])
        sim.step(images[rows], labels[rows])
    right = sim.average()(images[1500:]).argmax(1) == labels[1500:]
    mixing, copies = mixing_rate(schedule), copies_between_racks(schedule)
    row = (
        f"{mixing:6.3f} {copies:21.1f} {sim.consensus_distance():9.3f} {right.float().mean():9.3f}"
    )
    print(f"{name:15} {row}")
