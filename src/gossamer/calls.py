"""Texts such as ``phases(constant(c=0.25), plain, at=(3, 5))``: a name and its arguments.

Read here, and not by ``ast``: Python 3.11 keeps one count of depth for the syntax trees of all
threads, so of two threads that parse at a time one may get a SystemError
(https://github.com/python/cpython/issues/106905), and ranks can be threads.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any, final

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<integer>[+-]?\d[\d_]*(?![\w.]))
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    |(?P<quoted>'[^'\\]*'|"[^"\\]*")
    |(?P<name>[^\W\d]\w*)
    |(?P<mark>[()\[\],=])
    )\s*""",
    re.VERBOSE,
)

_CONSTANTS = {"None": None, "True": True, "False": False}


@final
class Name(str):
    """A word without quotes."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class Call:
    """A name with its arguments: names, calls, numbers, quoted texts, tuples and lists of them."""

    name: str
    positional: list[Any] = field(default_factory=list[Any])
    named: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        named = (f"{key}={_show(value)}" for key, value in self.named.items())
        return f"{self.name}({', '.join([*map(_show, self.positional), *named])})"


def read(text: str) -> Call:
    """Return what a text says; a name alone is a call without arguments.

    Raises:
        ValueError: the text is anything else.

    >>> read("lattice(4, weights=uniform)")
    Call(name='lattice', positional=[4], named={'weights': 'uniform'})
    """
    reader = _Reader(text)
    try:
        value = reader.read_value()
    except RecursionError:
        raise ValueError("brackets too deep") from None
    reader.check_end()
    if isinstance(value, Name):
        return Call(value)
    if not isinstance(value, Call):
        raise ValueError("a value where a name must be")
    return value


@final
class _Reader:
    """Takes a text apart, from left to right."""

    def __init__(self, text: str) -> None:
        self._tokens: deque[tuple[str, str]] = deque()
        end = 0
        while end < len(text):
            match = _TOKEN.match(text, end)
            if match is None:
                raise ValueError(f"{text[end : end + 10]!r} is no part of a call")
            kind = str(match.lastgroup)
            self._tokens.append((kind, match[kind]))
            end = match.end()

    def read_value(self) -> Any:
        kind, word = self._take()
        if kind == "integer":
            return int(word)
        if kind == "number":
            return float(word)
        if kind == "quoted":
            return word[1:-1]
        if kind == "name":
            return self._read_name(word)
        if word == "(":
            values, has_comma = self._read_values(")")
            return tuple(values) if has_comma or not values else values[0]
        if word == "[":
            return self._read_values("]")[0]
        raise ValueError(f"{word!r} where a value must be")

    def check_end(self) -> None:
        if self._tokens:
            raise ValueError(f"{self._tokens[0][1]!r} after the end")

    def _read_name(self, name: str) -> Any:
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if not self._next_is("("):
            return Name(name)
        self._take()
        call = Call(name)
        while not self._next_is(")"):
            self._read_argument(call)
            if not self._next_is(")"):
                self._take(",")
        self._take()
        return call

    def _read_argument(self, call: Call) -> None:
        value = self.read_value()
        if not self._next_is("="):
            if call.named:
                raise ValueError("an argument without a name after one with a name")
            call.positional.append(value)
            return
        if not isinstance(value, Name) or value in call.named:
            raise ValueError(f"{value!r} where a new name must be")
        self._take()
        call.named[str(value)] = self.read_value()

    def _read_values(self, closing: str) -> tuple[list[Any], bool]:
        """Return the values up to a closing bracket, and whether there was a comma."""
        values: list[Any] = []
        has_comma = False
        while not self._next_is(closing):
            values.append(self.read_value())
            if not self._next_is(closing):
                self._take(",")
                has_comma = True
        self._take()
        return values, has_comma

    def _next_is(self, mark: str) -> bool:
        return bool(self._tokens) and self._tokens[0] == ("mark", mark)

    def _take(self, mark: str = "") -> tuple[str, str]:
        if not self._tokens or (mark and not self._next_is(mark)):
            raise ValueError(f"no {mark or 'value'!r} where one must be")
        return self._tokens.popleft()


def _show(value: Any) -> str:
    return str(value) if isinstance(value, Name | Call) else repr(value)
