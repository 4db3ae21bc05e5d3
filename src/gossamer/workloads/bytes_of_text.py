"""Byte-level language models, on the source of Python's standard library and on Shakespeare."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import UserError
from gossamer.workloads.evaluation import bits_per_byte, next_token_loss, token_loss
from gossamer.workloads.files import DataFiles, data_folder
from gossamer.workloads.models.transformer import GPT
from gossamer.workloads.workload import Data, Recipe, Workload

_CONTEXT = 64
_STDLIB_TRAIN, _STDLIB_TEST = 2 << 20, 64 << 10
"""Bytes that are used: no more than the standard library of every Python has."""

_SHAKESPEARE = 1_115_394


def stdlib_gpt() -> Workload:
    """A transformer of 120,576 parameters on the source of Python's standard library.

    Results are comparable only with the same version of Python.
    """
    return Workload(
        name="stdlib-gpt",
        version=1,
        num_train=num_windows(_STDLIB_TRAIN, _CONTEXT),
        make_model=lambda: GPT(256, _CONTEXT, width=64, layers=2, heads=4),
        load=_load_stdlib,
        loss=next_token_loss,
        metric_name="bits per byte",
        higher_is_better=False,
        evaluate=bits_per_byte,
        recipe=_recipe(lr=3e-3, batch_size=8, steps_per_epoch=50, evaluate_samples=40),
    )


def shakespeare_gpt() -> Workload:
    """A transformer of 834,304 parameters on Tiny Shakespeare: nanoGPT's recipe for one CPU."""
    return Workload(
        name="shakespeare-gpt",
        version=1,
        num_train=num_windows(_SHAKESPEARE * 9 // 10, _CONTEXT),
        make_model=lambda: GPT(256, _CONTEXT, width=128, layers=4, heads=4),
        load=lambda: _load_shakespeare(data_folder()),
        loss=next_token_loss,
        metric_name="loss",
        higher_is_better=False,
        evaluate=token_loss(),
        target=1.9,
        recipe=_recipe(lr=1e-3, batch_size=12, steps_per_epoch=200, evaluate_samples=200),
    )


def _recipe(lr: float, batch_size: int, steps_per_epoch: int, evaluate_samples: int) -> Recipe:
    return Recipe(
        optimizer="adamw",
        optimizer_options={"betas": (0.9, 0.99), "weight_decay": 0.1},
        lr=lr,
        lr_schedule="cosine",
        warmup_epochs=0.5,
        batch_size=batch_size,
        epochs=10,
        steps_per_epoch=steps_per_epoch,
        evaluate_samples=evaluate_samples,
    )


def num_windows(num_tokens: int, length: int) -> int:
    """Return how many samples ``windows`` cuts from a sequence of tokens."""
    return (num_tokens - 1) // length


def windows(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut tokens into consecutive samples; a target is the token after its input."""
    num = num_windows(len(tokens), length)
    inputs, targets = tokens[: num * length], tokens[1 : num * length + 1]
    return inputs.view(num, length), targets.view(num, length)


@cache
def _load_stdlib() -> Data:
    folder = Path(sysconfig.get_path("stdlib"))
    wanted = _STDLIB_TRAIN + _STDLIB_TEST
    text = bytearray()
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        if len(text) < wanted:
            text += path.read_bytes()
    if len(text) < wanted:
        raise UserError(
            f"stdlib-gpt needs {wanted:,} bytes of Python's own modules as source, got "
            f"{len(text):,} in {folder}; use a Python that comes with its standard library's source"
        )
    return _split_bytes(bytes(text[:wanted]), _STDLIB_TRAIN, _CONTEXT)


@cache
def _load_shakespeare(folder: Path) -> Data:
    text = DataFiles("shakespeare", folder).read("tinyshakespeare/input.txt", _SHAKESPEARE)
    return _split_bytes(text, len(text) * 9 // 10, _CONTEXT)


def _split_bytes(text: bytes, num_train: int, length: int) -> Data:
    """Return the first part as training data, the rest as test data."""
    tokens = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
    return Data(*windows(tokens[:num_train], length), *windows(tokens[num_train:], length))
