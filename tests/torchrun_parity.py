"""What test_gossip_processes runs under torchrun: train, and compare with the reference."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import gossamer
from gossamer.topology import parse
from tests import reference
from tests.reference import ALL_OPTIMIZERS, ORDERS, loss_of, make_model, vector_of


def compare(group: ProcessGroup | None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for topology in ("ring", "base_graph(k=1)"):
        for order in ORDERS:
            model = make_model()
            optimizer = ALL_OPTIMIZERS["adamw"](model.parameters())
            gossip = gossamer.decentralize(
                model, optimizer, topology, order=order, process_group=group
            )
            for step in range(11):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
            gossip.close()
            expected = reference.train(parse(topology, size), order, ALL_OPTIMIZERS["adamw"], 11)
            torch.testing.assert_close(vector_of(model), expected[rank], rtol=0, atol=1e-12)
    print(f"one of {size} is equal to the reference", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare(None)
    for ranks in ([1, 3], [4]):
        group = dist.new_group(ranks)
        if isinstance(group, ProcessGroup):  # on the others it is a number
            compare(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
