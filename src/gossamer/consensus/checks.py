"""Checks of what targets and policies are given, wherever they are made: in Python too.

Here because many parts take the same kinds of numbers. Elsewhere a limit stands once, and its error
says what that one value is for: a helper would save the ``if`` and lose the remedy.
"""

from __future__ import annotations

import math

from gossamer.errors import UserError


def check_kind(what: str, name: str, value: object, *kinds: type) -> None:
    """Refuse a value of another kind; True is no number."""
    if type(value) is bool or not isinstance(value, kinds):
        raise UserError(
            f"{what} needs {kinds[0].__name__} for {name}, got {value!r}; give one of that kind"
        )


def check_positive(what: str, name: str, value: float, remedy: str) -> None:
    """Refuse what is not a finite number above zero."""
    check_kind(what, name, value, float, int)
    if not 0 < value < math.inf:
        raise UserError(f"{what} needs a finite {name} > 0, got {name}={value}; {remedy}")


def check_at_least(what: str, name: str, value: int, least: int) -> None:
    """Refuse what is not a whole number of at least so much."""
    check_kind(what, name, value, int)
    if value < least:
        raise UserError(f"{what} needs {name} of at least {least}, got {value}; use {least}")
