"""One style per method in all figures: colour, and for colour-blind readers dash and symbol."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gossamer.charts.theme import PALETTE, REFERENCE

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "cross",
    "x",
    "triangle-down",
    "star",
    "pentagon",
    "hexagram",
    "bowtie",
)


class Style(NamedTuple):
    """The style of a method."""

    color: str
    dash: str
    symbol: str


def styles(decentralized: Iterable[str], centralized: Iterable[str]) -> dict[str, Style]:
    """Return the style of every method.

    Colours repeat after six, dashes after thirty and symbols after eleven: 330 methods differ.
    """
    return {
        **{name: _style(REFERENCE, number, number) for number, name in enumerate(centralized)},
        **{
            name: _style(PALETTE[number % len(PALETTE)], number // len(PALETTE), number)
            for number, name in enumerate(decentralized)
        },
    }


def _style(color: str, dash: int, symbol: int) -> Style:
    return Style(color, _DASHES[dash % len(_DASHES)], _SYMBOLS[symbol % len(_SYMBOLS)])


def faded(color: str, opacity: float) -> str:
    """Return a colour of the form #rrggbb with an opacity."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
