"""Error and cost of estimating the consensus distance of real training by a sketch.

    python -m benchmarks.sketch [--steps 60] [--seeds 20] [--parameters 10000000] [--repeats 9]

Error: a multilayer perceptron and a convolutional network on scikit-learn's digits, 16 workers on a
ring (adapt then combine, SGD with momentum), each on its own shard; and, as the hardest case, two
workers that differ by one outer product. At every fifth step of training the
estimate of Ξ from each construction and seed is compared with the exact Ξ. ``theory`` is the mean
of √(1/(2·m·r)), with r the directions in which workers deviate. Cost: one sketch of a flat vector
in single precision on one thread, beside a 2-norm of it and beside training steps of two models of
about that many parameters. Prints JSON lines, then tables.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import torch
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.interleaved import median_ms, mlp_step, transformer_step
from gossamer.consensus import (
    Constant,
    Observation,
    Sketch,
    bind,
    consensus_distance,
    sketch_distance,
    sketch_error,
    tensor_norms,
)
from gossamer.topology import ring, static

WORKERS = 16
SIZE = 509

Construction = Callable[[int, Tensor], Tensor]
"""From a seed and parameters [W, N] to sketches [W, m]."""


def main(
    steps: Annotated[int, typer.Option()] = 60,
    seeds: int = 20,
    parameters: int = 10_000_000,
    repeats: int = 9,
) -> None:
    """Print errors, then costs."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    trajectories = {name: list(train(build, steps)) for name, build in MODELS.items()} | rank_one()
    for name, trajectory in trajectories.items():
        for construction, sketch in CONSTRUCTIONS.items():
            rows.append({"model": name, "construction": construction})
            rows[-1] |= errors(sketch, trajectory, seeds)
            print(json.dumps(rows[-1]), flush=True)
    times = cost(parameters, repeats)
    print(json.dumps(times), flush=True)
    print("\n| model | construction | median error | 95th percentile | bias | theory |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        figures = " | ".join(f"{100 * row[key]:.2f} %" for key in ("p50", "p95", "bias", "theory"))
        print(f"| {row['model']} | {row['construction']} | {figures} |")
    print("\n| what | ms | sketch / what |\n|---|---|---|")
    for what, ms in times.items():
        print(f"| {what} | {ms:.2f} | {times['sketch'] / ms:.3f} |")


# - Real trajectories


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "convnet": convnet}


def train(build: Callable[[], nn.Module], steps: int) -> Iterator[Tensor]:
    """Yield the parameters [W, N] of all workers just before they mix, at every fifth step."""
    torch.manual_seed(0)
    first = build()
    workers = [copy.deepcopy(first) for _ in range(WORKERS)]
    optimizers = [torch.optim.SGD(w.parameters(), lr=0.05, momentum=0.9) for w in workers]
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels)
    shards = torch.randperm(len(inputs)).split(len(inputs) // WORKERS)
    mixing = torch.tensor(ring(WORKERS).matrix().toarray(), dtype=torch.float32)
    for step in range(steps):
        for worker, optimizer, shard in zip(workers, optimizers, shards, strict=False):
            batch = shard[torch.randint(len(shard), (16,))]
            optimizer.zero_grad()
            nn.functional.cross_entropy(worker(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        x_WN = torch.stack([nn.utils.parameters_to_vector(w.parameters()) for w in workers])
        x_WN = x_WN.detach()
        if step % 5 == 4:
            yield x_WN
        for worker, x_N in zip(workers, mixing @ x_WN, strict=True):
            nn.utils.vector_to_parameters(x_N, worker.parameters())


def rank_one() -> dict[str, list[Tensor]]:
    """Two workers apart by one outer product, the hardest case: 4096 rows, 512 columns.

    Activations after a ReLU are positive, so all rows are alike; or few of them are not zero.
    """
    rng = torch.Generator().manual_seed(0)
    rows, columns = torch.rand(4096, 1, generator=rng), torch.rand(512, generator=rng)
    few = columns * (torch.rand(512, generator=rng) < 0.05)
    apart = {"positive activations": rows * columns, "few activations": rows * few}
    return {name: [torch.stack([d.flatten(), -d.flatten()])] for name, d in apart.items()}


# - Constructions


def table_of_signs(size: int) -> Construction:
    return lambda seed, x_WN: Sketch(size, seed).sketch_stacked([x_WN])


def same_signs_per_block(seed: int, x_WN: Tensor) -> Tensor:
    """The same block of signs for all blocks, each block with its own sign: no offsets."""
    rng = torch.Generator().manual_seed(seed)
    block = 128 * SIZE
    num_blocks = -(-x_WN.shape[1] // block)
    flips = torch.randint(0, 2, (num_blocks,), generator=rng) * 2 - 1
    signs = torch.randint(0, 2, (block,), generator=rng) * 2 - 1
    return folded(x_WN, (flips[:, None] * signs).flatten())


def independent_signs(seed: int, x_WN: Tensor) -> Tensor:
    """A stored sign for every element."""
    rng = torch.Generator().manual_seed(seed)
    return folded(x_WN, torch.randint(0, 2, (x_WN.shape[1],), generator=rng) * 2 - 1)


def count_sketch(seed: int, x_WN: Tensor) -> Tensor:
    """A stored sign and a stored place for every element."""
    rng = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (x_WN.shape[1],), generator=rng) * 2 - 1
    places = torch.randint(0, SIZE, (x_WN.shape[1],), generator=rng)
    return x_WN.new_zeros(len(x_WN), SIZE, dtype=torch.float64).index_add_(
        1, places, (x_WN * signs).double()
    )


def folded(x_WN: Tensor, signs: Tensor) -> Tensor:
    """Element e goes to place e mod m."""
    padding = -x_WN.shape[1] % SIZE
    signed = nn.functional.pad(x_WN * signs[: x_WN.shape[1]], (0, padding))
    return signed.view(len(x_WN), -1, SIZE).sum(1, dtype=torch.float64)


CONSTRUCTIONS: dict[str, Construction] = {
    "table of signs, 509 (ours)": table_of_signs(SIZE),
    "table of signs, 512": table_of_signs(512),
    "same signs in every block, 509": same_signs_per_block,
    "independent signs, 509": independent_signs,
    "count sketch, 509": count_sketch,
}


def errors(sketch: Construction, trajectory: list[Tensor], seeds: int) -> dict[str, float]:
    """Return percentiles of |Ξ̂/Ξ − 1| over steps and seeds, the bias of Ξ̂², and the theory."""
    ratios: list[float] = []
    theory: list[float] = []
    for x_WN in trajectory:
        exact = consensus_distance([x_WN])
        for seed in range(seeds):
            sketches = sketch(seed, x_WN).numpy()
            ratios.append(sketch_distance(sketches) / exact)
            theory.append(sketch_error(sketches))
    error = np.abs(np.array(ratios) - 1)
    return {
        "p50": round(float(np.percentile(error, 50)), 5),
        "p95": round(float(np.percentile(error, 95)), 5),
        "bias": round(float(np.mean(np.square(ratios)) - 1), 5),
        "theory": round(float(np.mean(theory)), 5),
    }


# - Cost


def cost(parameters: int, repeats: int) -> dict[str, float]:
    """Return milliseconds, medians of interleaved repeats."""
    x_N = torch.randn(parameters)
    cut = list(x_N.split(100_003))
    ours = Sketch()
    places = torch.randint(0, SIZE, (parameters,))
    tasks: dict[str, Callable[[], object]] = {
        "sketch": lambda: ours.sketch([x_N]),
        "sketch of 100 tensors": lambda: ours.sketch(cut),
        "2-norm": lambda: x_N.norm(),
        "norms of 100 tensors, for dispersion": lambda: tensor_norms([t[None] for t in cut]),
        "decision, 32 workers on a ring at a quarter of the distance": decision(),
        "count sketch without its hash": lambda: torch.zeros(SIZE).index_add_(0, places, x_N),
        "step of an mlp, batch 32": mlp_step(parameters, 32),
        "step of a transformer, 8 x 64 tokens": transformer_step(parameters),
    }
    return median_ms(tasks, repeats)


def decision() -> Callable[[], object]:
    """One decision of the controller that repeats most in Kong et al.'s table: about 12 rounds."""
    controller = bind(Constant(c=0.25), static(ring(32)), "atc")
    state, rng = controller.start(0), np.random.default_rng(0)
    x_nm = np.zeros((32, SIZE))
    seen = Observation(step=0, lr=1.0)
    for step in range(250):  # the longest calibration takes 200
        x_nm = x_nm + rng.standard_normal(x_nm.shape)
        seen = Observation(step=step, lr=1.0, sketches=x_nm)
        chosen, state = controller.decide(seen, state)
        for round in chosen.rounds:
            x_nm = np.asarray(round.matrix() @ x_nm)
    return lambda: controller.decide(seen, state)


if __name__ == "__main__":
    typer.run(main)
