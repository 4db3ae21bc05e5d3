"""Lightning's Trainer with gossip; with --ddp, the same by DDP.

torchrun --nproc-per-node 2 examples/lightning_strategy.py
"""

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer.frameworks.lightning import GossipStrategy

EPOCHS, SEED, RANKS = 12, 0, 2

torch.set_num_threads(1)
features, classes = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(features / 16, dtype=torch.float32), torch.tensor(classes))
train = torch.utils.data.Subset(digits, range(1536))
test = torch.utils.data.Subset(digits, range(1536, len(digits)))


class Digits(lightning.LightningModule):
    """A perceptron with a cosine rate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log loss and accuracy, of all ranks together."""
        logits = self.layers(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        accuracy = (logits.argmax(1) == batch[1]).float().mean()
        self.log_dict({"loss": loss, "accuracy": accuracy}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return the optimizer with its scheduler."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


lightning.seed_everything(SEED, verbose=False)
strategy: Any = "ddp" if "--ddp" in sys.argv else GossipStrategy()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=RANKS,
    strategy=strategy,
    max_epochs=EPOCHS,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint("out-lightning", monitor="loss", save_last=True)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
loaders = DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=29)
resume = "out-lightning/last.ckpt" if "--resume" in sys.argv else None
trainer.fit(Digits(), *loaders, ckpt_path=resume)
(found,) = trainer.validate(dataloaders=loaders[1], verbose=False)
if trainer.is_global_zero:
    print(f"evaluation loss {found['loss']:.4f}, test accuracy {found['accuracy']:.3f}")
