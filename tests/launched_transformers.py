"""What ranks do with Hugging Face's Trainer, for tests/test_frameworks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from gossamer import decentralize
from gossamer.errors import UserError
from gossamer.frameworks.transformers import GossipTrainer
from gossamer.optim import AccumAdamW
from tests.launched import run_example

__all__ = ["run_example"]

EXACT = {"topology": "complete", "algorithm": "atc"}


def make(kind: type[Trainer], folder: str, options: Any = None, **changes: Any) -> Any:
    """Return a trainer of a tiny model, with dropout, tied tables and random tokens."""
    set_seed(0)
    shape: dict[str, Any] = {
        "n_positions": 8,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 32,
    }
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**shape, **ends, use_cache=False))
    tokens = torch.randint(32, (96, 8), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    given: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "cosine",
        "eval_steps": 4,
        "save_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    arguments = TrainingArguments(**{**given, **changes})
    more: dict[str, Any] = {} if kind is Trainer else {"decentralize": options or {}}
    if "optim" not in changes:
        more["optimizer_cls_and_kwargs"] = (AccumAdamW, {"lr": 0.05, "window": 2})
    return kind(model, arguments, train_dataset=samples[:64], eval_dataset=samples[64:], **more)


def vector_of(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def train_by_sgd(gossips: bool, folder: str) -> Tensor:
    """Return the parameters after some steps of SGD without clipping or dropout's difference."""
    changes = {"optim": "sgd", "max_grad_norm": 0.0, "save_strategy": "no"}
    kind = GossipTrainer if gossips else Trainer
    trainer = make(kind, folder, EXACT, **changes)
    trainer.model.eval()
    trainer.model.train = lambda mode=True: trainer.model  # no dropout: ranks draw their own
    trainer.train()
    assert (trainer.model_wrapped is trainer.model) == gossips
    return vector_of(trainer)


def train_and_resume(folder: str) -> dict[str, Any]:
    """Train to the end, and again from the checkpoint in the middle."""
    trainer = make(GossipTrainer, folder, eval_strategy="steps")
    trainer.train()
    whole, steps = vector_of(trainer), trainer.gossip.num_steps
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    saved = GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-4")
    trainer.model = trainer.model_wrapped = saved
    loss_of_saved = trainer.evaluate()["eval_loss"]
    again = make(GossipTrainer, folder, eval_strategy="steps")
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    last = make(GossipTrainer, folder)
    last.train(resume_from_checkpoint=True)  # nothing is left to do
    return {
        "whole": whole,
        "steps": steps,
        "losses": losses,
        "loss_of_saved": loss_of_saved,
        "resumed": vector_of(again),
        "resumed_steps": again.gossip.num_steps,
        "last": vector_of(last),
    }


def train_more_ways(folder: str) -> dict[str, Any]:
    """Load the best model at the end; evaluate several data sets; train in bfloat16, and twice."""
    trainer = make(
        GossipTrainer,
        folder,
        {"topology": "ring"},
        bf16=True,
        eval_strategy="steps",
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    trainer.eval_dataset = {"a": trainer.eval_dataset[:16], "b": trainer.eval_dataset[16:]}
    trainer.args.metric_for_best_model = "eval_a_loss"
    trainer.train()
    best = GPT2LMHeadModel.from_pretrained(trainer.state.best_model_checkpoint)
    loaded = torch.cat([p.detach().flatten() for p in best.parameters()])
    result = {"average": vector_of(trainer), "best": loaded}
    trainer.args.max_steps = 9
    trainer.train()
    return {**result, "kept": sorted(path.name for path in Path(folder).glob("checkpoint-*"))}


def refuse(folder: str) -> list[str]:
    """Return what is said about what cannot work."""

    class Gossips(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            decentralize(model, optimizer.optimizer)

    trainer = make(Trainer, folder, optim="sgd")
    trainer.add_callback(Gossips())
    with pytest.raises(UserError) as through_ddp:
        trainer.train()
    wrapped = make(GossipTrainer, folder, optim="sgd", save_strategy="no")
    wrapped.model = wrapped.model_wrapped = DistributedDataParallel(wrapped.model)
    with pytest.raises(UserError) as in_ddp:
        wrapped.create_optimizer()
    with pytest.raises(UserError) as by_itself:
        make(GossipTrainer, folder, auto_find_batch_size=True)
    with pytest.raises(UserError) as too_early:
        _ = make(GossipTrainer, folder).gossip
    return [str(each.value) for each in (through_ddp, in_ddp, by_itself, too_early)]
