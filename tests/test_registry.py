"""From a string to a part: what is read, bound, converted and refused, whatever the kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import pytest

from gossamer.errors import UserError
from gossamer.registry import Registry


@runtime_checkable
class Goal(Protocol):
    """What is wanted."""

    def goal(self) -> float:
        """Return it."""
        ...


@runtime_checkable
class Way(Protocol):
    """What is done about it."""

    def way(self) -> str:
        """Return its name."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A goal that stays."""

    c: float

    def goal(self) -> float:
        """The same."""
        return self.c


@dataclass(frozen=True)
class Several:
    """Goals in turn."""

    goals: tuple[Goal, ...]
    at: tuple[int, ...]

    def goal(self) -> float:
        """The first."""
        return self.goals[0].goal()


@dataclass(frozen=True)
class Again:
    """A way."""

    target: Goal
    most: int = 4
    by: str = "bytes"

    def way(self) -> str:
        """By what."""
        return self.by


def several(*goals: Goal, at: tuple[int, ...] = ()) -> Several:
    return Several(goals, at)


TABLE: dict[str, Callable[..., Any]] = {"fixed": Fixed, "several": several, "again": Again}
CONTROLS: Registry[Goal | Way] = Registry(
    kind="control",
    table=TABLE,
    group="gossamer.tests",
    example="fixed(c=1)",
    makes=(Goal, Way),
    stands_for=(Goal, Way),
)


def every(  # noqa: PLR0913 - one parameter per kind
    workers: int,
    /,
    whole: int = 1,
    number: float = 1.0,
    *,
    yes: bool = False,
    word: str = "",
    pair: tuple[float, int] = (1.0, 1),
    some: list[int] | None = None,
    one_of: Literal["a", "b"] = "a",
    goal: Goal | int = 0,
    anything: Any = None,
) -> dict[str, Any]:
    """Everything. Second sentence."""
    return locals()


KINDS: Registry[dict[str, Any]] = Registry(
    kind="kind", table={"every": every}, group="gossamer.tests", example="every", given=1
)


def test_a_string_becomes_a_part_and_has_a_canonical_form() -> None:
    """Calls may be nested, *args taken, and bare words are names where parts are wanted."""
    part = CONTROLS.parse("again( several(fixed(c=1), fixed(2), at=(3,)), most=16 )")
    expected = Again(Several((Fixed(1.0), Fixed(2.0)), (3,)), 16)
    assert part.make() == expected
    assert part.name == "again(target=several(fixed(c=1), fixed(2), at=(3,)), most=16)"
    assert CONTROLS.parse(part.name).make() == expected
    assert part.identity == part.name


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("every", {}),
        ("every(3, 2)", {"whole": 3, "number": 2.0}),
        ("every(yes=true, word=true_north)", {"yes": True, "word": "true_north"}),
        ("every(word='a b', pair=(1, 2))", {"word": "a b", "pair": (1.0, 2)}),
        ("every(some=[1, 2], one_of=b)", {"some": [1, 2], "one_of": "b"}),
        ("every(some=(1, 2))", {"some": [1, 2]}),
        ("every(some=None, goal=3)", {"goal": 3}),
        ("every(goal=fixed(c=2))", {"goal": Fixed(2.0)}),
        ("every(anything=word)", {"anything": "word"}),
    ],
)
def test_arguments_are_converted_by_annotations(text: str, changes: dict[str, Any]) -> None:
    """Numbers, booleans, words, sequences, choices, parts of another kind, and unions of them."""
    made = KINDS.parse(text).make(8)
    assert made == {**every(8), **changes}
    assert [type(value) for value in made.values()] == [
        type(value) for value in {**every(8), **changes}.values()
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("everyy", r"unknown kind 'everyy' \(did you mean 'every'\?\); choose from every"),
        (
            "every(",
            r"a kind is a name or name\(argument=value, ...\), .* got 'every\('; for instan",
        ),
        (
            "every(whol=3)",
            r"every takes whole, .* got 'whol' \(did you mean 'whole'\?\); use every",
        ),
        ("every(workers=3)", "every takes whole, .* got 'workers'"),
        ("every(3, whole=3)", "got whole twice; give it once, by name"),
        ("every(whole=3.0)", "every needs an integer for whole, got 3.0; see every"),
        ("every(whole=true)", "an integer for whole, got True"),
        ("every(number=half)", "a number for number, got 'half'"),
        ("every(yes=1)", "true or false for yes, got 1"),
        ("every(word=1)", "a string for word, got 1"),
        (
            "every(pair=(1, 2, 3))",
            r"a tuple of a number, an integer, for pair, got \(",
        ),
        ("every(pair=1)", "a tuple of .* for pair, got 1"),
        ("every(some=[a])", r"an integer, or None for some, got \['a'\]"),
        ("every(one_of=c)", "a or b for one_of, got 'c'"),
        ("every(goal=fixd(c=1))", "a goal or an integer for goal, got 'fixd.*mean 'fixed'"),
        ("every(anything=every(1))", r"a plain value for anything, got 'every\(1\)'"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, words: str) -> None:
    """In three parts: what was required, what was given, what to do; with the nearest name."""
    with pytest.raises(UserError, match=words):
        KINDS.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fixed", r"fixed needs c, got no arguments; for instance fixed\(c=…\)"),
        (
            "again(fixd)",
            r"again needs a goal for target, got 'fixd' \(did you mean 'fixed'\?\); cho",
        ),
        (
            "again(again(fixed(1)))",
            r"needs a goal for target, got 'again\(.*\)'; choose from fixed",
        ),
        ("again(3)", "needs a goal for target, got 3; choose from"),
        ("several(fixed(1), 3)", "several needs a goal for goals, got 3"),
        ("several(fixed(1), fixed(c=x))", "fixed needs a number for c, got 'x'"),
        ("several(fixed(1), too=3)", r"several takes at, \*goals, got 'too'"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(text: str, words: str) -> None:
    """Where one is an argument: it must be of the kind that the annotation names."""
    with pytest.raises(UserError, match=words):
        CONTROLS.parse(text)


def test_defaults_fill_what_a_string_leaves_open() -> None:
    """They are written down; a part that does not take one ignores it."""
    part = CONTROLS.parse("again(fixed(1))", {"most": 9, "other": 1})
    assert part.name == "again(most=9, target=fixed(1))"
    assert part.make() == Again(Fixed(1.0), 9)
    assert CONTROLS.parse("again(fixed(1), 2)", {"most": 9}).make() == Again(Fixed(1.0), 2)


def test_a_part_describes_itself() -> None:
    """By the first line of its docstring."""
    assert KINDS.parse("every").description == "Everything. Second sentence."


PARAMETRIC = '''
from __future__ import annotations
from dataclasses import dataclass
from tests.test_registry import Goal, Again

COUNT = 3

@dataclass(frozen=True)
class Own:
    """A goal of mine."""
    share: float
    inner: Goal | None = None

    def goal(self) -> float:
        return self.share

def loose(target, word=None):
    return Again(target, by=str(word))

def wrong():
    return 3

def broken(c: float = 1.0):
    return c / 0
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of plug-ins."""
    (tmp_path / "own.py").write_text(PARAMETRIC)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plug_in_stands_where_a_name_does(folder: Path) -> None:
    """With arguments, nested on either side, converted by its annotations where it has any."""
    own = CONTROLS.parse("again(own.py:Own(share=2), most=8)")
    assert own.make().target == CONTROLS.parse("own.py:Own(2)").make()  # pyright: ignore
    nested = CONTROLS.parse("own.py:Own(1, inner=own.py:Own(2))").make()
    assert nested.inner.goal() == 2.0  # pyright: ignore
    loose = CONTROLS.parse("own.py:loose(fixed(c=1), word=plain)").make()
    assert loose == Again(Fixed(1.0), by="plain")
    assert own.name == "again(target=own.py:Own(share=2), most=8)"
    assert own.plugins["own.py:Own"].digest in own.identity
    assert "own.py" not in own.identity


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "own.py:Own",
            r"own.py:Own needs share, got no arguments; for instance own.py:Own\(share=…",
        ),
        ("own.py:Own(share=x)", "own.py:Own needs a number for share, got 'x'"),
        ("own.py:COUNT", "must be a function or a class, got own.py:COUNT, which is an int"),
        ("own.py:wrong", "a control must be a Goal or a Way, got an int from own.py:wrong; corr"),
        ("own.py:broken", "own.py:broken must make a control, got ZeroDivisionError: .*; correct"),
        (
            "own.py:Ownn",
            r"name of its module, got own.py:Ownn \(did you mean 'Own'\?\); choose from",
        ),
        ("again(own.py:wrong)", "a control must be a Goal or a Way, got an int"),
    ],
)
def test_a_bad_plug_in_says_what_is_wrong(folder: Path, text: str, words: str) -> None:
    """As of built-in ones; what its own code raised is the cause."""
    with pytest.raises(UserError, match=words) as caught:
        CONTROLS.parse(text).make()
    if "broken" in text:
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
