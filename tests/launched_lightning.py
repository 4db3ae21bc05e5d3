"""What ranks do with Lightning, for tests/test_frameworks.py."""

from __future__ import annotations

import os
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer import decentralize
from gossamer.errors import UserError
from gossamer.frameworks.lightning import GossipStrategy
from gossamer.optim import AccumAdamW
from tests.launched import run_example

__all__ = ["load_digits", "run_example"]  # the example imports both

EXACT = {"topology": "complete", "algorithm": "atc"}


class Module(lightning.LightningModule):
    """A regression, with a schedule that is stepped by the step."""

    def __init__(self, adam: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.adam = adam
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss."""
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log the loss of all ranks, and keep this rank's parameters."""
        self.log("loss", self.training_step(batch, index), sync_dist=True)
        self.seen.append(float(self.layers[0].weight.detach().double().sum()))  # pyright: ignore

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule."""
        optimizer = (
            AccumAdamW(self.parameters(), lr=0.05, window=2)
            if self.adam
            else torch.optim.SGD(self.parameters(), lr=0.1)
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader() -> DataLoader[Any]:
    inputs = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


def make(strategy: Any, epochs: int, **options: Any) -> lightning.Trainer:
    given: dict[str, Any] = {"enable_checkpointing": False, **options}
    return lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


def vector_of(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def train_by_sgd(gossips: bool, folder: str) -> Tensor:
    """Return the parameters after some steps of SGD without clipping."""
    module = Module(adam=False)
    make(GossipStrategy(decentralize=EXACT) if gossips else "ddp", 2).fit(module, loader())
    return vector_of(module)


def checkpointing(folder: str) -> dict[str, Any]:
    saving = ModelCheckpoint(folder, "{epoch}", monitor="loss", save_top_k=2, save_last=True)
    return {"enable_checkpointing": True, "callbacks": [saving], "gradient_clip_val": 0.5}


def train_and_resume(folder: str) -> dict[str, Any]:
    """Train three epochs, and the last one again from the checkpoint before it."""
    module, strategy = Module(adam=True), GossipStrategy(decentralize={"topology": "ring"})
    trainer = make(strategy, 3, **checkpointing(folder))
    trainer.fit(module, loader(), loader())
    whole = vector_of(module)
    saved = torch.load(f"{folder}/epoch=1.ckpt", weights_only=False)["state_dict"]
    again, other = Module(adam=True), GossipStrategy(decentralize={"topology": "ring"})
    trainer = make(other, 3, **checkpointing(f"{folder}/again"))
    trainer.fit(again, loader(), loader(), ckpt_path=f"{folder}/epoch=1.ckpt")
    return {
        "whole": whole,
        "steps": strategy.gossip.num_steps,
        "seen": module.seen,
        "sum_of_saved": float(saved["layers.0.weight"].double().sum()),
        "resumed": vector_of(again),
        "resumed_steps": other.gossip.num_steps,
        "kept": sorted(os.listdir(folder)),
    }


def train_more_ways(folder: str) -> dict[str, Any]:
    """Train in bfloat16; twice; and raise on one rank, which the other is told."""
    module, strategy = Module(adam=True), GossipStrategy()
    trainer = make(strategy, 1, precision="bf16-mixed")
    trainer.fit(module, loader(), loader())
    first = vector_of(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())

    class Fails(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_rank == 1:
                raise ZeroDivisionError

    with pytest.raises((RuntimeError, ZeroDivisionError)) as raised:
        make(GossipStrategy(), 1, callbacks=[Fails()]).fit(Module(adam=True), loader())
    return {"first": first, "second": vector_of(module), "raised": str(raised.value)}


def refuse(folder: str) -> list[str]:
    """Return what is said about what cannot work."""

    class Gossips(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            decentralize(pl_module, trainer.optimizers[0])

    with pytest.raises(UserError) as through_ddp:
        make("ddp", 1, callbacks=[Gossips()]).fit(Module(adam=False), loader())
    with pytest.raises(UserError) as too_early:
        _ = GossipStrategy().gossip
    return [str(each.value) for each in (through_ddp, too_early)]
