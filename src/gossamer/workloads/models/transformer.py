"""Transformers: a language model, and an encoder and decoder for translation.

Blocks are pre-norm. Attention weights have no dropout, so that attention is one fused kernel.
"""

# B: batch, T: time, C: width

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KeysAndValues: TypeAlias = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Multi-head attention of a sequence to another one, or to itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x_BTC: Tensor, to: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Return attention of each position to ``to``, where the mask (B1TT) is true."""
        return self.attend(x_BTC, self.keys_and_values(to), mask, causal)

    def keys_and_values(self, to: Tensor) -> KeysAndValues:
        """Return the keys and values of ``to``."""
        keys, values = self.key_value(to).chunk(2, -1)
        return self._split(keys), self._split(values)

    def attend(
        self, x_BTC: Tensor, to: KeysAndValues, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Return attention of each position to given keys and values."""
        query = self._split(self.query(x_BTC))
        y = F.scaled_dot_product_attention(query, *to, mask, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(-2))

    def _split(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (self._heads, -1)).transpose(1, 2)


@final
@dataclass(slots=True)
class Past:
    """The key-value cache of a decoder's block, for generation token by token."""

    memory: KeysAndValues
    own: KeysAndValues | None = None
    """Of the positions so far."""


class Block(nn.Module):
    """Self-attention, cross-attention where there is a memory, and an MLP."""

    def __init__(
        self, width: int, heads: int, hidden: int, *, dropout: float = 0.0, memory: bool = False
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        if memory:
            self.memory_norm = nn.LayerNorm(width)
            self.memory_attention = Attention(width, heads)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x_BTC: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the sequence after this block."""
        normed = self.norm(x_BTC)
        x_BTC = x_BTC + self.dropout(self.attention(normed, normed, mask, causal))
        if memory is not None:
            taken = self.memory_attention(self.memory_norm(x_BTC), memory, memory_mask)
            x_BTC = x_BTC + self.dropout(taken)
        return x_BTC + self.dropout(self.perceptron(x_BTC))

    def step(self, x_B1C: Tensor, past: Past, memory_mask: Tensor) -> Tensor:
        """Return the output of a new last position: ``forward`` without dropout, by the cache."""
        normed = self.norm(x_B1C)
        keys, values = self.attention.keys_and_values(normed)
        if past.own is not None:
            keys = torch.cat((past.own[0], keys), 2)
            values = torch.cat((past.own[1], values), 2)
        past.own = keys, values
        x_B1C = x_B1C + self.attention.attend(normed, past.own)
        taken = self.memory_attention.attend(self.memory_norm(x_B1C), past.memory, memory_mask)
        x_B1C = x_B1C + taken
        return x_B1C + self.perceptron(x_B1C)


class GPT(nn.Module):
    """A language model as GPT-2: learned positions, tied input and output embeddings."""

    def __init__(self, vocabulary: int, context: int, *, width: int, layers: int, heads: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, 4 * width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        _initialize(self, layers)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of each position's next token."""
        x = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x = block(x, causal=True)
        return F.linear(self.norm(x), self.tokens.weight)


def _initialize(model: nn.Module, layers: int) -> None:
    """Initialize as GPT-2: std 0.02, scaled down where layers add to the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            adds = name.endswith(("out.weight", "perceptron.3.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


class Translator(nn.Module):
    """An encoder and a decoder (Vaswani et al., https://arxiv.org/abs/1706.03762).

    A sample is one row of tokens: ``length`` of the source, then the target as the decoder's input.
    Token 0 is padding. The output layer is tied to the target embedding.
    """

    def __init__(
        self, vocabulary: int, length: int, *, width: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.length = length
        self.source = nn.Embedding(vocabulary, width)
        self.target = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.encoder = nn.ModuleList(
            Block(width, heads, 2 * width, dropout=dropout) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            Block(width, heads, 2 * width, dropout=dropout, memory=True) for _ in range(layers)
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        _initialize(self, layers)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of the token after each of the target's."""
        source, target = tokens_BT[:, : self.length], tokens_BT[:, self.length :]
        memory, mask = self.encode(source)
        return F.linear(self.decode(target, memory, mask), self.target.weight)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's output, and its padding mask."""
        mask = (source != 0)[:, None, None, :]
        x = self._embed(self.source, source)
        for block in self.encoder:
            x = block(x, mask)
        return self.encoder_norm(x), mask

    def decode(self, target: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Return states of the target's positions, each of which knows those before it."""
        x = self._embed(self.target, target)
        for block in self.decoder:
            x = block(x, causal=True, memory=memory, memory_mask=mask)
        return self.decoder_norm(x)

    @torch.no_grad()
    def translate(self, source: Tensor, begin: int, end: int) -> Tensor:
        """Return translations that take the most likely token every time, without the first."""
        memory, mask = self.encode(source)
        blocks = cast("list[Block]", list(self.decoder))
        pasts = [Past(block.memory_attention.keys_and_values(memory)) for block in blocks]
        tokens = torch.full((len(source), 1), begin)
        ended = torch.zeros(len(source), 1, dtype=torch.bool)
        for position in range(self.length - 1):
            x = self.target(tokens[:, -1:]) + self.positions.weight[position]
            for block, past in zip(blocks, pasts, strict=True):
                x = block.step(x, past, mask)
            new = F.linear(self.decoder_norm(x), self.target.weight).argmax(-1)
            tokens = torch.cat((tokens, new), 1)
            ended |= new == end
            if ended.all():
                break
        return tokens[:, 1:]

    def _embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        return self.dropout(table(tokens) + self.positions.weight[: tokens.shape[1]])
