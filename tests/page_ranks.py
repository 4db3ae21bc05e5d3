"""What runs on each rank of a pool for a page: its blocks of Python, and whole scripts.

Every rank imports this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from gossamer.gossip import Gossip

# What a test has in the place of more workers, epochs, GPUs and nodes.
SMALLER = {
    '"cuda"': '"cpu"',
    "1008": "16",
    "EPOCHS = ": "EPOCHS = 1 or ",
    'optimizer, "profile.json"': 'optimizer, "profile.json", steps=4, warmup=1',
    "--nproc-per-node 2": "--nproc-per-node 1",
}

SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
fully_shard(model, mesh=mesh["within"])
optimizer = torch.optim.AdamW(model.parameters())
"""

# What a reader's script has before a block, by words of the block.
PRELUDES = {
    "in batches": "batches = [(torch.randn(16, 2, 64), torch.zeros(16, 2, dtype=torch.long))]",
    "in loader": "loader = []",
    "worker_seed(": "seed, rank, step = 0, 1, 2",
    "Centralized(": "optimizer = lambda params: torch.optim.SGD(params, lr=0.1)",
    "make_optimizer": "make_optimizer = lambda params: torch.optim.SGD(params, lr=0.1)",
    "[muon, adamw]": """
muon, adamw = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))
closure = lambda: model(torch.ones(1, 64)).sum()
""",
    "perturb(model)": """
perturb = lambda model: None
loss = lambda model: model(torch.ones(1, 64)).sum()
""",
    "MemberSampler(": """
from torch.utils.data import DataLoader
total, data = 3, [(torch.ones(64), index % 10) for index in range(512)]
""",
    "init_device_mesh(": """
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
num_nodes, gpus = 2, 2
""",
    "import torch.distributed.checkpoint as dcp\n\ngossip =": SHARDED,
    "get_state_dict(": SHARDED,
    'within=mesh["within"])\n': """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
""",
    "train_one_step(": """
NUM_STEPS, train_one_step = 3, lambda step: optimizer.step()
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
""",
    "Sketch(": """
from gossamer.consensus import Sketch, sketch_distance, sketch_error
parameters = list(model.parameters())
tensors = [torch.stack([p, 2 * p]).detach() for p in parameters]
sketches_nm = Sketch().sketch_stacked(tensors).numpy()
""",
    "parse_control(": """
import numpy as np
from gossamer.consensus import Observation, bind, parse_control
from gossamer.topology import parse
schedule, step = parse("ring", 4), 0
observation = Observation(step=0, lr=0.1, sketches=np.eye(4))
""",
    'Store(Path("results/digits"))': """
from tests.stories import spec_of, story_of, write
if dist.get_rank() == 0:
    write(Path("results/digits"), [story_of(spec_of("D_ring"), 0.9)])
dist.barrier()
""",
    "store.norms(": """
from gossamer.bench import Store
from gossamer.bench.recording import record_run
from gossamer.engine import run
from tests.stories import spec_of
store, run_id = Store(Path(f"norms-{dist.get_rank()}")), spec_of("D_ring").id
with store.locked(""):
    record_run(store, run_id, lambda: run(spec_of("D_ring"), norms_mb=1), print)
""",
}

FRESH = """
import torch, gossamer
import torch.distributed as dist
from pathlib import Path
from torch import nn
from unittest import mock
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss, evaluate = nn.functional.cross_entropy, lambda model: model(torch.zeros(1, 64))
"""


NAMES: dict[str, Any] = {}
"""In a process of the pool: what the blocks of a page have in common."""


def run_block(text: str, folder: Path) -> None:
    """Run a block with a model and optimizer of its own; it may use the names of those before."""
    if gossip := NAMES.get("gossip"):
        gossip.close()
    gossips = re.search(r"\bgossip\b", text) and not re.search(r"gossip = |as gossip", text)
    start = [FRESH, *(code for words, code in PRELUDES.items() if words in text)]
    start += ["gossip = gossamer.decentralize(model, optimizer)"] if gossips else []
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), quick_links(text):
        exec("\n".join(start), NAMES)
        exec(compile(smaller(text), "<page>", "exec"), NAMES)


@contextlib.contextmanager
def quick_links(text: str) -> Generator[None]:
    """Have a block that measures links take less time over it; how well is not asked here."""
    if "measure" not in text:
        yield
        return
    from gossamer.runtime_model import links, measure  # takes a while to import

    with mock.patch.object(links, "_WINDOW_S", 0.004), mock.patch.object(measure, "_TINY_STEPS", 3):
        yield


def smaller(text: str) -> str:
    """Return a script that asks for less."""
    for words, others in SMALLER.items():
        text = text.replace(words, others)
    return text


def forget() -> None:
    """End what the blocks of a page left behind."""
    if isinstance(gossip := NAMES.get("gossip"), Gossip):
        gossip.close()
    NAMES.clear()


def run_script(path: Path) -> str:
    """Run a script in the process group that is there; return what it prints."""
    output, text = io.StringIO(), smaller(path.read_text())
    with (
        contextlib.redirect_stdout(output),
        contextlib.chdir(path.parent),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        quick_links(text),
    ):
        exec(compile(text, path, "exec"), {"__name__": "__main__"})
    return output.getvalue()
