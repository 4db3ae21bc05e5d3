"""Binds the arguments of a call to the parameters of a function, or raises."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import UnionType
from typing import Any, cast, final, get_origin, get_type_hints

from gossamer.errors import UserError, nearest_in_brackets, quoted
from gossamer.registry.calls import Call
from gossamer.registry.conversion import Parts, Unfit, convert, literal


@final
@dataclass(frozen=True)
class Bound:
    """Arguments bound to parameters."""

    by_name: dict[str, Any]
    rest: list[Any] = field(default_factory=list[Any])
    """Those of ``*args``."""


@final
class Parameters:
    """The parameters of a function that a string may set.

    Args:
        name: what errors call the function.
        build: the function, or the class.
        given: how many leading parameters the caller fills, not the string.
        reserved: names of other parameters that the caller fills.
        example: a valid call.
    """

    def __init__(
        self,
        name: str,
        build: Callable[..., Any],
        *,
        given: int = 0,
        reserved: Sequence[str] = (),
        example: str = "",
    ) -> None:
        self._name, self._build, self._example = name, build, example
        every = (_parameters_of if isinstance(cast(object, build), Hashable) else _read)(build)
        kinds = {parameter.kind: parameter.name for parameter in every}
        self._rest = kinds.get(inspect.Parameter.VAR_POSITIONAL)
        self._any = kinds.get(inspect.Parameter.VAR_KEYWORD)
        variadic = (self._rest, self._any)
        own = [p for p in every if p.name not in variadic][given:]
        self._own = {p.name: p for p in own if p.name not in reserved}

    @property
    def doc(self) -> str:
        """The docstring."""
        return inspect.getdoc(self._build) or ""

    @property
    def names(self) -> list[str]:
        """Of all parameters that have one."""
        return list(self._own)

    @property
    def example(self) -> str:
        """A call with all required arguments."""
        needed = ", ".join(f"{name}=…" for name in self._required())
        return self._example or (f"{self._name}({needed})" if needed else self._name)

    def bind(self, positional: Sequence[Any], named: dict[str, Any]) -> Bound:
        """Bind arguments to parameters; raise on one that has no parameter."""
        places = self._places()
        shown = [*self._own, *([f"*{self._rest}"] if self._rest else [])]
        takes = f"{self._name} takes {', '.join(shown) or 'no arguments'}"
        if len(positional) > len(places) and not self._rest:
            raise UserError(f"{takes}, got {len(positional)} arguments; give fewer, or by name")
        for key in named:
            if key not in self._own and not self._any:
                remedy = f"use {self.example}" if self._own else f"write {self._name} by itself"
                hint = nearest_in_brackets(key, self._own)
                raise UserError(f"{takes}, got {quoted(key)}{hint}; {remedy}")
        by_place = dict(zip(places, positional, strict=False))
        if twice := by_place.keys() & named.keys():
            raise UserError(f"{takes}, got {', '.join(sorted(twice))} twice; give it once, by name")
        return Bound(by_place | named, list(positional[len(places) :]))

    def check_complete(self, bound: Bound) -> None:
        """Raise where a required argument is missing."""
        missing = [name for name in self._required() if name not in bound.by_name]
        if missing:
            got = ", ".join(bound.by_name) or "no arguments"
            raise UserError(
                f"{self._name} needs {', '.join(missing)}, got {got}; for instance {self.example}"
            )

    def convert(self, bound: Bound, parts: Parts) -> Bound:
        """Return the arguments converted to the types of the annotations."""
        if not bound.by_name and not bound.rest:
            return bound
        hints = _hints(self._build)
        by_name = {
            key: self._converted(
                key, value, hints.get(key if key in self._own else self._any), parts
            )
            for key, value in bound.by_name.items()
        }
        wanted = hints.get(self._rest)
        rest = [self._converted(str(self._rest), value, wanted, parts) for value in bound.rest]
        return Bound(by_name, rest)

    def call(self, given: Sequence[Any], bound: Bound, others: dict[str, Any]) -> Any:
        """Call the function with its first arguments, those of the call, and others by name."""
        named = dict(bound.by_name)
        placed = [
            named.pop(p.name)
            for p in self._own.values()
            if p.name in named and (bound.rest or p.kind is p.POSITIONAL_ONLY) and _has_place(p)
        ]
        return self._build(*given, *placed, *bound.rest, **named, **others)

    def _places(self) -> list[str]:
        """Return the parameters that positional arguments bind to.

        Keyword-only ones after a bare * too, which have an order as well; none after *args.
        """
        return [p.name for p in self._own.values() if not self._rest or _has_place(p)]

    def _required(self) -> list[str]:
        return [p.name for p in self._own.values() if p.default is p.empty]

    def _converted(self, key: str, value: Any, wanted: Any, parts: Parts) -> Any:
        try:
            return convert(value, wanted, parts)
        except Unfit as unfit:
            remedy = unfit.remedy or f"see {self.example}"
            raise UserError(
                f"{self._name} needs {unfit.words} for {key}, got {_shown(value)}{unfit.hint}; "
                f"{remedy}"
            ) from None


def promise_of(build: Callable[..., Any]) -> type | None:
    """Return a function's annotated return type, or a class itself; None where unknown."""
    returned = build if isinstance(build, type) else _hints(build).get("return")
    returned = get_origin(returned) or returned
    return returned if isinstance(returned, type) and returned is not UnionType else None


def _read(build: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(build).parameters.values())


# Cached: reading a signature takes most of the time of a lookup, and experiments make thousands.
_parameters_of = lru_cache(1024)(_read)


def _hints(build: Callable[..., Any]) -> dict[str | None, Any]:
    """Return the annotations of a function or a class, without those that cannot be resolved."""
    function = getattr(build, "func", build)  # of a partial
    described = function.__init__ if isinstance(function, type) else function
    if not inspect.isroutine(described):
        described = type(described).__call__
    names = getattr(described, "__globals__", None)
    hints: dict[str | None, Any] = {}
    for name, annotation in getattr(described, "__annotations__", {}).items():
        # One at a time: an annotation under TYPE_CHECKING must not hide the others.
        with contextlib.suppress(Exception):  # evaluating a string may raise anything
            hints[name] = get_type_hints(_annotated(name, annotation), names)[name]
    return hints


def _annotated(name: str, annotation: Any) -> Any:
    def stand_in() -> None: ...

    stand_in.__annotations__ = {name: annotation}
    return stand_in


def _has_place(parameter: inspect.Parameter) -> bool:
    return parameter.kind is not parameter.KEYWORD_ONLY


def _shown(value: Any) -> str:
    value = literal(value)
    return repr(str(value)) if isinstance(value, Call) else repr(value)
