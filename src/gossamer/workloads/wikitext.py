"""WikiText-2: articles of Wikipedia, tokenized into words by their publishers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import UserError
from gossamer.workloads.bytes_of_text import num_windows, windows
from gossamer.workloads.evaluation import next_token_loss, perplexity
from gossamer.workloads.files import DataFiles, data_folder
from gossamer.workloads.models.lstm import WordLSTM
from gossamer.workloads.workload import Data, Recipe, Workload

_CONTEXT = 35
_NUM_TRAIN, _NUM_TEST = 2_088_628, 245_569
_VOCABULARY = 33_278
_END = "<eos>"


def wikitext2_lstm(width: int = 200) -> Workload:
    """An LSTM of 7,332,078 parameters (two layers of 200, output tied to input); perplexity.

    Args:
        width: of the layers and of a word; with 16, 570,078 parameters.
    """
    if not 1 <= width <= 2000:
        raise UserError(f"wikitext2-lstm needs a width of 1 to 2000, got {width}; use 16")
    return Workload(
        name="wikitext2-lstm" if width == 200 else f"wikitext2-lstm(width={width})",
        version=1,
        num_train=num_windows(_NUM_TRAIN, _CONTEXT),
        make_model=lambda: WordLSTM(_VOCABULARY, width),
        load=lambda: _load(data_folder()),
        loss=next_token_loss,
        metric_name="perplexity",
        higher_is_better=False,
        evaluate=perplexity,
        recipe=Recipe(
            optimizer="adam",
            optimizer_options={},
            lr=2e-3,
            lr_schedule="cosine",
            batch_size=20,
            epochs=40,
            evaluate_samples=500,
        ),
    )


@cache
def _load(folder: Path) -> Data:
    return read_wikitext2(folder)


def read_wikitext2(
    folder: Path,
    num_train: int = _NUM_TRAIN,
    num_test: int = _NUM_TEST,
    vocabulary: int = _VOCABULARY,
) -> Data:
    """Read the published words of train and test; a newline is a word too."""
    files = DataFiles("wikitext2", folder)
    train_name, test_name = "wikitext-2/wiki.train.tokens", "wikitext-2/wiki.test.tokens"
    numbers: dict[str, int] = {}
    train = _read_words(files, train_name, num_train, numbers)
    if len(numbers) != vocabulary:
        raise files.damaged(train_name, f"{vocabulary:,} different words", f"{len(numbers):,}")
    test = _read_words(files, test_name, num_test, numbers)
    if len(numbers) != vocabulary:
        found = f"{len(numbers) - vocabulary:,} others"
        raise files.damaged(test_name, "words of the training text", found)
    return Data(*windows(train, _CONTEXT), *windows(test, _CONTEXT))


def _read_words(files: DataFiles, name: str, num: int, numbers: dict[str, int]) -> Tensor:
    """Return a file's words as indices; a new word gets the next index."""
    words = (word for line in files.read_lines(name) for word in (*line.split(), _END))
    tokens = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.int64)
    if len(tokens) != num:
        raise files.damaged(name, f"{num:,} words and ends of lines", f"{len(tokens):,}")
    return torch.from_numpy(tokens)
