"""Hugging Face's Trainer with gossip; with --ddp, the same by DDP.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from gossamer.frameworks.transformers import GossipTrainer
from gossamer.optim import AccumAdamW

STEPS, SEED, RATE, CONTEXT = 120, 0, 1e-3, 64

torch.set_num_threads(1)
modules = sorted(Path(os.__file__).parent.glob("*.py"))
source = b"".join(path.read_bytes() for path in modules)[: 64 * 30_000]
windows = torch.frombuffer(bytearray(source), dtype=torch.uint8).long().view(-1, CONTEXT)
samples: list[dict[str, Any]] = [{"input_ids": row, "labels": row} for row in windows]

set_seed(SEED)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=256,  # a token is a byte
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
)
arguments = TrainingArguments(
    output_dir="out-transformers",
    use_cpu=True,
    seed=SEED,
    max_steps=STEPS,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=RATE,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    weight_decay=0.1,
    adam_beta2=0.99,
    max_grad_norm=1.0,
    eval_strategy="steps",
    eval_steps=40,
    save_steps=40,
    save_total_limit=2,
    per_device_eval_batch_size=16,
    report_to="none",
    disable_tqdm=True,
)
made: dict[str, Any] = {
    "model": model,
    "args": arguments,
    "train_dataset": samples[:-320],
    "eval_dataset": samples[-320:],
}
if "--ddp" in sys.argv:
    trainer = Trainer(**made)
else:
    settings = {"lr": RATE, "betas": (0.9, 0.99), "weight_decay": 0.1, "window": 2}
    trainer = GossipTrainer(**made, optimizer_cls_and_kwargs=(AccumAdamW, settings))
trainer.train(resume_from_checkpoint="--resume" in sys.argv)
loss = trainer.evaluate()["eval_loss"]
trainer.save_model("out-transformers/average")
if trainer.is_world_process_zero():
    print(f"evaluation loss {loss:.4f}")
