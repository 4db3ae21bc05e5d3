"""Strings of a name with arguments, against Python's own parser, and from several threads."""

from __future__ import annotations

import ast
import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.consensus import parse_control
from gossamer.errors import UserError
from gossamer.registry.calls import Call, Name, read
from gossamer.topology import parse

NAMES = st.sampled_from(["ring", "k", "k0", "_x", "true", "Nonesuch"])


def calls(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    named = st.dictionaries(NAMES, values, max_size=3)
    return st.builds(Call, NAMES, st.lists(values, max_size=3), named)


VALUES = st.recursive(
    st.integers(-10_000, 10_000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([None, True, False])
    | st.text("ab (=,'\"é", max_size=4).filter(lambda text: not {"'", '"'} <= {*text})
    | NAMES.map(Name),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | calls(inner)
    ),
    max_leaves=8,
)


def text_of(value: Any) -> str:
    """Write a value as Python would, with all names and calls in it."""
    if isinstance(value, Call):
        named = [f"{key}={text_of(item)}" for key, item in value.named.items()]
        return f"{value.name}({', '.join([*map(text_of, value.positional), *named])})"
    if isinstance(value, list):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{text_of(item)}, ' for item in value)})"
    return str(value) if isinstance(value, Name) else repr(value)


@settings(max_examples=300)
@given(call=calls(VALUES))
def test_what_is_written_is_read(call: Call) -> None:
    """Any nesting of names, calls, numbers, strings, lists and tuples comes back as it was."""
    assert read(f" {text_of(call)} ") == call
    ast.parse(text_of(call), mode="eval")  # it is Python, too


@settings(max_examples=600)
@given(text=st.text("ring(k0=1.5e_-+,) []'\"", max_size=12))
def test_what_is_not_python_is_refused(text: str) -> None:
    """Whatever is read would also be a name or a call in Python, but for dashes within names."""
    try:
        read(text)
    except ValueError:
        return
    python = re.sub(r"(?<=[^\W\d])(\w*)-(?=\w)", r"\1_", text.strip())
    assert isinstance(ast.parse(python, mode="eval").body, ast.Name | ast.Call)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("digits-mlp", "digits-mlp"),
        ("graphs.py:chords", "graphs.py:chords"),
        ("2026/my-graphs.py:chords", "2026/my-graphs.py:chords"),
        ("my_pkg.control:pi", "my_pkg.control:pi"),
        ("'/home/me (work)/a, b.py':chords", "/home/me (work)/a, b.py:chords"),
        ('"it\'s.py":chords', "it's.py:chords"),
    ],
)
def test_names_have_dashes_and_those_of_plug_ins_have_a_place(text: str, name: str) -> None:
    """With arguments, among arguments and without; what is shown parses to the same."""
    nested = Call("repeat", [Name(name), Call(name, [1], {"k": Name(name)})])
    assert read(text) == read(f"{text}()") == Call(name)
    assert read(f"repeat({text}, {text}(1, k={text}))") == nested
    assert read(str(nested)) == nested


@settings(max_examples=100)
@given(call=calls(VALUES))
def test_what_is_shown_is_read(call: Call) -> None:
    """The string of a call is read as that call, where ``ring()`` and ``ring`` are the same."""
    assert str(read(str(call))) == str(call)


@pytest.mark.parametrize(
    "text",
    ["", " ", "1", "'ring'", "(ring, ring)", "ring(", "ring)", "ring(,)", "ring(k=)", "ring(=4)",
     "ring(1=2)", "ring(k=1, k=2)", "ring(k=1, 2)", "ring(1 2)", "ring k", "ring.k", "ring(1+1)",
     "ring(--1)", "ring(1__0)", "ring(0x10)", "ring(1.2.3)", "ring('a\\n')", "ring({})", "ring;",
     "ring(" * 100_000],
)  # fmt: skip
def test_anything_else_is_an_error(text: str) -> None:
    """A ValueError, and never another exception."""
    with pytest.raises(ValueError):  # noqa: PT011 - callers say what they need
        read(text)


def test_threads_parse_at_the_same_time() -> None:
    """Ranks that are threads all start with this.

    A collection of garbage in the middle of it lets another thread run, which parses as well.
    With Python 3.11's ``ast`` the first one then fails.
    """
    parser = threading.get_ident()
    threshold = gc.get_threshold()

    def parse_both() -> None:
        with pytest.raises(UserError, match="unknown topology"):
            parse("no_such(k=4, weights=uniform)", 8)
        parse_control("repeat(phases(constant(c=0.25), plain), q_max=16)")

    def parse_meanwhile(*_: object) -> None:
        if threading.get_ident() == parser:
            other.submit(parse_both).result()

    with ThreadPoolExecutor(1) as other:
        gc.callbacks.append(parse_meanwhile)
        gc.set_threshold(1, 1000, 1000)
        try:
            parse_both()
        finally:
            gc.set_threshold(*threshold)
            gc.callbacks.remove(parse_meanwhile)
