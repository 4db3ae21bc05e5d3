"""Transformers: a language model, and an encoder and decoder for translation.

Blocks normalize first (pre-norm). Attention itself has no dropout, so that it is one fused kernel.
"""

# B: batch, T: time, C: width

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F


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
        """Return what each position takes from ``to``, where the mask (B1TT) is true."""
        query, key, value = (
            part.unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for part in (self.query(x_BTC), *self.key_value(to).chunk(2, -1))
        )
        y = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Self-attention, attention to a memory where there is one, and a perceptron."""

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


class GPT(nn.Module):
    """A language model in the form of GPT-2: learned positions, input and output tables tied."""

    def __init__(self, vocabulary: int, context: int, *, width: int, layers: int, heads: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, 4 * width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        initialize(self, layers)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of each position's next token."""
        x = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x = block(x, causal=True)
        return F.linear(self.norm(x), self.tokens.weight)


def initialize(model: nn.Module, layers: int) -> None:
    """Draw weights as GPT-2 does: narrow, and narrower where they add to the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            adds = name.endswith(("out.weight", "perceptron.3.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
