"""Argument checks of targets and policies, for those built in Python and from strings.

Here because many parts take the same kinds of numbers. Elsewhere a limit occurs once, and its error
says what that one value is for: a helper would save the ``if`` and lose the remedy.
"""

from __future__ import annotations

import math

from gossamer.errors import UserError


def check_kind(what: str, name: str, value: object, *kinds: type) -> None:
    """Raise unless a value has one of the types; a bool is not a number here."""
    if type(value) is bool or not isinstance(value, kinds):
        raise UserError(
            f"{what} needs {kinds[0].__name__} for {name}, got {value!r}; give one of that kind"
        )


def check_positive(what: str, name: str, value: float, remedy: str) -> None:
    """Raise unless a value is finite and above zero."""
    check_kind(what, name, value, float, int)
    if not 0 < value < math.inf:
        raise UserError(f"{what} needs a finite {name} > 0, got {name}={value}; {remedy}")


def check_at_least(what: str, name: str, value: int, least: int) -> None:
    """Raise unless a value is an integer of at least ``least``."""
    check_kind(what, name, value, int)
    if value < least:
        raise UserError(f"{what} needs {name} of at least {least}, got {value}; use {least}")
