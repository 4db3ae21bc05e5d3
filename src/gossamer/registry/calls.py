"""Strings such as ``phases(constant(c=0.25), plain, at=(3, 5))``: a name and its arguments.

A name may have dashes (``digits-mlp``), or be that of a plug-in: ``package.module:name`` or
``path/file.py:name``, whose path is quoted where it has spaces, brackets or commas.

A parser of our own instead of ``ast``: Python 3.11 shares one recursion counter between the syntax
trees of all threads, so that of two threads that parse concurrently one may get a SystemError
(https://github.com/python/cpython/issues/106905), and ranks can be threads. A lock of ours would
not keep others from parsing (dataclasses and torch.compile do), and neither dashes nor plug-ins are
Python's names.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

_PLAIN_PATH = r"""[^\s()\[\],='":]+"""

_TOKEN = re.compile(
    rf"""\s*(?:
    (?P<plugin>(?:{_PLAIN_PATH}|'[^'\\]*'|"[^"\\]*"):[^\W\d][\w.]*)
    |(?P<integer>[+-]?[0-9][0-9_]*(?![\w.]))
    |(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.]))
    |(?P<quoted>'[^'\\]*'|"[^"\\]*")
    |(?P<name>[^\W\d]\w*(?:-\w+)*)
    |(?P<mark>[()\[\],=])
    )\s*""",
    re.VERBOSE,
)

_QUOTES = "'\""

_MOST_CHARACTERS = 10_000
_MOST_LEVELS = 30
_MOST_DIGITS = 18
"""The most digits of an integer, which then fits in 64 bits."""

_CONSTANTS = {"None": None, "True": True, "False": False}


@final
class Name(str):
    """An unquoted name, or a plug-in."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class Call:
    """A name with its arguments: names, calls, numbers, strings, tuples and lists of them."""

    name: str
    positional: list[Any] = field(default_factory=list[Any])
    named: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        named = (f"{key}={show(value)}" for key, value in self.named.items())
        arguments = ", ".join([*map(show, self.positional), *named])
        return f"{show(Name(self.name))}({arguments})" if arguments else show(Name(self.name))

    @property
    def names(self) -> set[str]:
        """All names in it, including its own."""
        found: set[str] = set()

        def note(name: str) -> str:
            found.add(name)
            return name

        self.renamed(note)
        return found

    def renamed(self, rename: Callable[[str], str]) -> Call:
        """Return the call with other names, its own and those among its arguments.

        >>> str(read("repeat(a.py:mine(c=1), q_max=4)").renamed(str.upper))
        'REPEAT(A.PY:MINE(c=1), q_max=4)'
        """
        positional = [_renamed(value, rename) for value in self.positional]
        named = {key: _renamed(value, rename) for key, value in self.named.items()}
        return Call(rename(self.name), positional, named)


def read(text: str) -> Call:
    """Parse a string; a bare name is a call without arguments.

    Raises:
        ValueError: it is not a call.

    >>> read("lattice(4, weights=uniform)")
    Call(name='lattice', positional=[4], named={'weights': 'uniform'})
    >>> read("'my graphs/chords.py':chords")
    Call(name='my graphs/chords.py:chords', positional=[], named={})
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"more than {_MOST_CHARACTERS} characters")
    reader = _Reader(text)
    value = reader.read_value()
    reader.check_end()
    if isinstance(value, Name):
        return Call(value)
    if not isinstance(value, Call):
        raise ValueError("a value where a name is expected")
    return value


@final
class _Reader:
    """A recursive-descent parser."""

    def __init__(self, text: str) -> None:
        self._tokens: deque[tuple[str, str]] = deque()
        self._level = 0
        end = 0
        while end < len(text):
            match = _TOKEN.match(text, end)
            if match is None:
                raise ValueError(f"{text[end : end + 10]!r} is no part of a call")
            kind = str(match.lastgroup)
            self._tokens.append((kind, match[kind]))
            end = match.end()

    def read_value(self) -> Any:
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise ValueError(f"brackets more than {_MOST_LEVELS} deep")
        value = self._read_value()
        self._level -= 1
        return value

    def _read_value(self) -> Any:
        kind, word = self._take()
        if kind == "integer":
            if len(word) > _MOST_DIGITS:
                raise ValueError(f"an integer of more than {_MOST_DIGITS} digits")
            return int(word)
        if kind == "number":
            return float(word)
        if kind == "quoted":
            return word[1:-1]
        if kind == "name":
            return self._read_name(word)
        if kind == "plugin":
            path, _, name = word.rpartition(":")
            return self._read_name(f"{path.strip(_QUOTES)}:{name}")
        if word == "(":
            values, has_comma = self._read_values(")")
            return tuple(values) if has_comma or not values else values[0]
        if word == "[":
            return self._read_values("]")[0]
        raise ValueError(f"{word!r} where a value is expected")

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
            raise ValueError(f"{value!r} where a new name is expected")
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
            raise ValueError(f"no {mark or 'value'!r} where one is expected")
        return self._tokens.popleft()


def show(value: Any) -> str:
    """Return a value as a string that parses to it.

    >>> show((Name("plain"), read("constant(c=1)"), "plain"))
    "(plain, constant(c=1), 'plain')"
    """
    match value:
        case Name():
            return _show_name(value)
        case str():
            return _quoted(value)
        case tuple() | list():
            items = ", ".join(map(show, value))
            if isinstance(value, list):
                return f"[{items}]"
            return f"({items},)" if len(value) == 1 else f"({items})"
        case _:
            return str(value)


def _show_name(name: str) -> str:
    path, colon, attribute = name.rpartition(":")
    if not colon or re.fullmatch(_PLAIN_PATH, path):
        return str(name)
    return f"{_quoted(path)}:{attribute}"


def _quoted(text: str) -> str:
    quote = '"' if "'" in text else "'"
    return f"{quote}{text}{quote}"


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    match value:
        case Call():
            return value.renamed(rename)
        case Name():
            return Name(rename(value))
        case tuple() | list():
            return type(value)(_renamed(item, rename) for item in value)
        case _:
            return value
