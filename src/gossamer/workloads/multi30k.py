"""Multi30k: descriptions of pictures, translated from English to German.

A sample is one row of tokens: the source, then the target as the decoder's input. Tokens are
lowercase words and punctuation marks; the vocabulary is the most frequent of each language.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from gossamer.extras import needed_by
from gossamer.workloads.files import DataFiles, data_folder
from gossamer.workloads.models.transformer import Translator
from gossamer.workloads.workload import Data, Recipe, Workload

_LENGTH = 32
"""Tokens of a source or a target with its end; 2 in 1000 training sentences are truncated."""

_VOCABULARY = 8000
_PADDING, _UNKNOWN, _BEGIN, _END = range(4)
_NUM_TRAIN, _NUM_TEST = 29_000, 1_000
_WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")


def multi30k_transformer() -> Workload:
    """A transformer of 8,058,880 parameters; BLEU of greedy translations, lowercase."""
    return Workload(
        name="multi30k-transformer",
        version=1,
        num_train=_NUM_TRAIN,
        make_model=lambda: Translator(
            _VOCABULARY, _LENGTH, width=256, layers=3, heads=8, dropout=0.1
        ),
        load=lambda: _corpus(data_folder()).data,
        loss=_smoothed_loss,
        metric_name="BLEU",
        evaluate=_bleu,
        recipe=Recipe(
            optimizer="adam",
            optimizer_options={"betas": (0.9, 0.98)},
            lr=7e-4,
            lr_schedule="inverse_sqrt",
            warmup_epochs=2,
            batch_size=64,
            epochs=20,
            evaluate_samples=200,
        ),
    )


class Corpus(NamedTuple):
    """The data, and the references for BLEU."""

    data: Data
    words: list[str]
    """Of the target language, by number."""

    references: list[str]
    """Of the test."""

    train_references: list[str]
    """Of the training samples, a part of which may be the validation set."""


def _smoothed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), ignore_index=_PADDING, label_smoothing=0.1
    )


def _bleu(model: nn.Module, data: Data) -> float:
    with needed_by("BLEU needs"):
        from sacrebleu import corpus_bleu
    corpus = _corpus(data_folder())
    hypotheses: list[str] = []
    for chosen in torch.arange(len(data.test_inputs)).split(250):
        sources = data.test_inputs[chosen][:, :_LENGTH]
        tokens = cast("Translator", model).translate(sources, _BEGIN, _END)
        hypotheses += [" ".join(_sentence(row, corpus.words)) for row in tokens.tolist()]
    references = corpus.train_references if data.validation else corpus.references
    if data.test_samples is not None:
        references = [references[sample] for sample in data.test_samples.tolist()]
    return float(corpus_bleu(hypotheses, [references], lowercase=True).score)


def _sentence(tokens: list[int], words: list[str]) -> Iterable[str]:
    for token in tokens:
        if token == _END:
            return
        if _END < token < len(words):
            yield words[token]


@cache
def _corpus(folder: Path) -> Corpus:
    return read_multi30k(folder)


def read_multi30k(folder: Path, num_train: int = _NUM_TRAIN, num_test: int = _NUM_TEST) -> Corpus:
    """Read the published sentences of task 1: train, and the test of 2016."""
    files = DataFiles("multi30k", folder)
    lines = {
        (part, language): files.read_lines(f"multi30k/{part}.{language}", num)
        for part, num in (("train", num_train), ("test_2016_flickr", num_test))
        for language in ("en", "de")
    }
    split = {key: [_WORD.findall(line.lower()) for line in own] for key, own in lines.items()}
    english, german = (_frequent_words(split["train", language]) for language in ("en", "de"))

    def pack(part: str) -> tuple[Tensor, Tensor]:
        sources = _rows(split[part, "en"], english)
        targets = _rows(split[part, "de"], german)
        begin = torch.full((len(targets), 1), _BEGIN)
        return torch.cat((sources, begin, targets[:, :-1]), 1), targets

    data = Data(*pack("train"), *pack("test_2016_flickr"))
    return Corpus(data, german, lines["test_2016_flickr", "de"], lines["train", "de"])


def _frequent_words(sentences: list[list[str]]) -> list[str]:
    counts = Counter(word for sentence in sentences for word in sentence)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    return ["<padding>", "<unknown>", "<begin>", "<end>", *frequent][:_VOCABULARY]


def _rows(sentences: list[list[str]], words: list[str]) -> Tensor:
    """Return tokens with an end token, padded to one length."""
    numbers = {word: number for number, word in enumerate(words)}
    rows: list[list[int]] = []
    for sentence in sentences:
        own = [numbers.get(word, _UNKNOWN) for word in sentence[: _LENGTH - 1]]
        rows.append([*own, _END] + [_PADDING] * (_LENGTH - 1 - len(own)))
    return torch.tensor(rows)
