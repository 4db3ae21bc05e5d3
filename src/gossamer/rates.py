"""Rates of links as a user writes them, in the lab as in a plan: `300mbit`, `1.5gbit`.

The decimal units of `tc`: 1 mbit = 1,000,000 bit/s.
"""

from __future__ import annotations

import re

from gossamer.errors import UserError, quoted

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", re.IGNORECASE)
_LEAST, _MOST = 10**3, 10**13


def parse_rate(text: str) -> int:
    """Return the bits per second that a rate such as `300mbit` stands for.

    >>> parse_rate("1.5gbit")
    1500000000
    """
    match = _RATE.fullmatch(text.strip())
    bits_s = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not _LEAST <= bits_s <= _MOST:
        raise UserError(
            "a rate must be a number and a unit (kbit, mbit, gbit), from "
            f"{format_rate(_LEAST)} to {format_rate(_MOST)}, got {quoted(text)}; "
            "write for example 300mbit or 1.5gbit"
        )
    return round(bits_s)


def format_rate(bits_s: float) -> str:
    """Return a rate in the largest unit that leaves it at least 1.

    >>> format_rate(1_500_000_000), format_rate(300_000_000)
    ('1.5gbit', '300mbit')
    """
    unit = next((unit for unit in ("gbit", "mbit") if bits_s >= _UNITS[unit]), "kbit")
    number = bits_s / _UNITS[unit]
    return f"{number:.0f}{unit}" if number >= 1000 else f"{number:.4g}{unit}"
