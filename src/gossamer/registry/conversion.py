"""Converts arguments by annotations: numbers, strings, sequences of them, and parts by name.

Nothing is evaluated and nothing is guessed: a value that does not fit its annotation is an error,
and a parameter without annotation gets the value as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin

from gossamer.registry.calls import Call, Name

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    NoneType: "None",
}
_SEQUENCES: dict[Any, Callable[[Iterable[Any]], Any]] = {tuple: tuple, list: list, Sequence: tuple}
_BOOLEANS = {"true": True, "false": False}


class Unfit(Exception):
    """A value does not fit its annotation.

    Args:
        words: what would fit.
        hint: the nearest name, in brackets.
        remedy: what to do; by default the example of the caller.
    """

    def __init__(self, words: str, hint: str = "", remedy: str = "") -> None:
        super().__init__(words)
        self.words, self.hint, self.remedy = words, hint, remedy


class Parts(Protocol):
    """Makes arguments that are parts themselves."""

    def knows(self, wanted: Any) -> bool:
        """Return whether an annotation is that of a kind of part."""
        ...

    def make(self, value: Any, wanted: Any) -> Any:
        """Return the part that a name or a call stands for.

        Raises:
            Unfit: it stands for none.
        """
        ...

    def make_any(self, value: Call | Name) -> Any:
        """Return what a name or a call stands for where there is no annotation."""
        ...


def convert(value: Any, wanted: Any, parts: Parts) -> Any:
    """Return a value converted to an annotation; lossy conversions raise.

    Raises:
        Unfit: it does not fit.
    """
    if parts.knows(wanted):
        return parts.make(value, wanted)
    origin, members = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return _first_fit(value, members, parts)
    if origin in _SEQUENCES and isinstance(value, list | tuple):
        return _SEQUENCES[origin](_each(value, wanted, members, parts))
    if wanted in (None, Any, object):
        return parts.make_any(value) if isinstance(value, Call | Name) else value
    plain = literal(value)
    if wanted is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    if not _fits(plain, wanted, origin, members):
        raise Unfit(_words(wanted))
    return plain


def _first_fit(value: Any, kinds: Iterable[Any], parts: Parts) -> Any:
    unfit: list[Unfit] = []
    for kind in kinds:
        try:
            return convert(value, kind, parts)
        except Unfit as error:
            unfit.append(error)
    hinted = max(unfit, key=lambda error: len(error.remedy))
    raise Unfit(" or ".join(error.words for error in unfit), hinted.hint, hinted.remedy)


def literal(value: Any) -> Any:
    """Return a value; an unquoted name is a string, and true and false are booleans."""
    return _BOOLEANS.get(value, str(value)) if isinstance(value, Name) else value


def with_booleans(value: Any) -> Any:
    """Return a value as it was written, except that true and false become booleans."""
    return _BOOLEANS.get(value, value) if isinstance(value, Name) else value


def _each(
    values: Sequence[Any], wanted: Any, members: tuple[Any, ...], parts: Parts
) -> Iterable[Any]:
    fixed = get_origin(wanted) is tuple and Ellipsis not in members
    if fixed and len(values) != len(members):
        raise Unfit(_words(wanted))
    kinds = members if fixed else [members[0]] * len(values)
    try:
        return [convert(value, kind, parts) for value, kind in zip(values, kinds, strict=True)]
    except Unfit:
        raise Unfit(_words(wanted)) from None


def _fits(value: Any, wanted: Any, origin: Any, members: tuple[Any, ...]) -> bool:
    if origin is Literal:
        return value in members
    if wanted in _WORDS:
        return type(value) is wanted
    known = origin or wanted
    return isinstance(value, known) if isinstance(known, type) else not isinstance(value, Call)


def _words(wanted: Any) -> str:
    origin, members = get_origin(wanted), get_args(wanted)
    if wanted in _WORDS:
        return _WORDS[wanted]
    if origin is Literal:
        return " or ".join(map(str, members))
    if origin in _SEQUENCES:
        kinds = dict.fromkeys(_words(member) for member in members if member is not Ellipsis)
        return f"a tuple of {', '.join(kinds)},"
    return f"a {getattr(wanted, '__name__', wanted)}"
