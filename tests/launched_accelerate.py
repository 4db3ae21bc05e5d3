"""What ranks do with Accelerate, for tests/test_frameworks.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer import decentralize
from gossamer.errors import UserError
from gossamer.frameworks.accelerate import GossipAccelerator
from gossamer.optim import AccumAdamW
from tests.launched import run_example

__all__ = ["load_digits", "run_example"]  # the example imports both

EXACT = {"topology": "complete", "algorithm": "atc"}


class Loop:
    """A loop with accumulation, a prepared loader and a schedule."""

    def __init__(self, accelerator: Any, adam: bool) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        optimizer = (
            AccumAdamW(model.parameters(), lr=0.05, window=2)
            if adam
            else torch.optim.SGD(model.parameters(), lr=0.1)
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
        inputs = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def train(self, clip: float = 0.0) -> Tensor:
        """Go once through the data; return the parameters."""
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward((self.model(inputs) - targets).square().mean())
                if self.accelerator.sync_gradients and clip:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def gossip(**options: Any) -> GossipAccelerator:
    return GossipAccelerator(cpu=True, gradient_accumulation_steps=2, **options)


def train_by_sgd(gossips: bool, folder: str) -> Tensor:
    """Return the parameters after some steps of SGD without clipping."""
    ddp = Accelerator(cpu=True, gradient_accumulation_steps=2) if not gossips else None
    return Loop(ddp or gossip(decentralize=EXACT), adam=False).train()


def train_and_resume(folder: str) -> dict[str, Any]:
    """Save in the middle, train on, load, and train on again."""
    accelerator = gossip(mixed_precision="bf16")
    loop = Loop(accelerator, adam=True)
    loop.train(clip=0.5)
    accelerator.save_state(f"{folder}/state")
    average = accelerator.gossip.averaged_state_dict()
    accelerator.save_model(loop.model, f"{folder}/model")
    whole = loop.train(clip=0.5)
    accelerator.load_state(f"{folder}/state")
    again = loop.train(clip=0.5)
    steps = accelerator.gossip.num_steps
    accelerator.end_training()
    files = {
        name: safetensors.torch.load_file(f"{folder}/{name}/model.safetensors")
        for name in ("state", "model")
    }
    return {
        "whole": whole,
        "again": again,
        "steps": steps,
        "average": average,
        **files,
        "kept": sorted(os.listdir(f"{folder}/state/gossip")),
    }


def resume(folder: str) -> Tensor:
    """Go on from what another run has saved."""
    accelerator = gossip(mixed_precision="bf16")
    loop = Loop(accelerator, adam=True)
    accelerator.load_state(f"{folder}/state")
    other = loop.train(clip=0.5)
    accelerator.end_training()
    return other


def refuse(folder: str) -> list[str]:
    """Return what is said about what cannot work."""
    messages: list[str] = []
    loop = Loop(Accelerator(cpu=True), adam=False)
    decentralize(loop.model.module, loop.optimizer.optimizer)
    with pytest.raises(UserError) as through_ddp:
        loop.train()
    messages.append(str(through_ddp.value))
    accelerator = gossip()
    with pytest.raises(UserError) as too_early:
        _ = accelerator.gossip
    messages.append(str(too_early.value))
    model = nn.Linear(2, 2)
    for things in ((model,), (torch.optim.SGD(model.parameters(), lr=0.1),)):
        with pytest.raises(UserError) as alone:
            accelerator.prepare(*things)
        messages.append(str(alone.value))
    return messages
