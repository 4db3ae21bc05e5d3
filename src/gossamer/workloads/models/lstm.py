"""A language model with recurrence."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class WordLSTM(nn.Module):
    """Two LSTM layers between an embedding and an output layer with tied weights.

    Every sample starts from a zero state.
    """

    def __init__(self, vocabulary: int, width: int, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout, batch_first=True)
        self.bias = nn.Parameter(self.words.weight.new_zeros(vocabulary))
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of each position's next word."""
        states, _ = self.lstm(self.dropout(self.words(words)))
        return F.linear(self.dropout(states), self.words.weight, self.bias)
