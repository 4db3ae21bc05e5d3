"""Registries, where a string is parsed, looked up and bound to its arguments.

Every kind of part (topologies, optimizers, workloads, ...) has a table that maps names to functions
or classes, and a ``Registry`` of it. Instead of a name in the table one may give a plug-in, or a
name that an installed distribution has registered as an entry point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, final

from gossamer.errors import UserError, nearest_in_brackets, quoted
from gossamer.registry import calls, plugins
from gossamer.registry.arguments import Bound, Parameters, promise_of
from gossamer.registry.calls import Call, Name
from gossamer.registry.conversion import Unfit, literal, with_booleans
from gossamer.registry.part import Kind, Part, a, is_subclass
from gossamer.registry.plugins import PlugIn

T = TypeVar("T")


def _itself(row: Any) -> Any:
    return row


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Registry(Generic[T]):
    """The parts of one kind, by name."""

    kind: str
    """The noun for one, in errors."""

    table: Mapping[str, Any]
    """Built-in ones."""

    group: str
    """Of the entry points by which distributions register more."""

    example: str
    """Example strings, for errors."""

    makes: tuple[Any, ...] = ()
    """Types, one of which a part must have; anything by default."""

    given: int = 0
    """How many leading arguments the caller fills, not the string. As an argument of another part,
    such a part is a function of them."""

    reserved: Sequence[str] = ()
    """Other arguments, by name, that the caller fills."""

    build_of: Callable[[Any], Callable[..., T]] = _itself
    """The function or class of a row of the table."""

    example_of: Callable[[str], str | None] = field(default=lambda name: None)
    """A valid string for a built-in name, with its required arguments."""

    remedy: str = "correct it"
    """What the author of a plug-in that does not make such a part can do."""

    instead: Mapping[str, str] = field(default_factory=dict[str, str])
    """What to write instead of names that users expect here, but which are not in the table."""

    stands_for: tuple[Any, ...] = ()
    """Annotations of parameters that take such a part, by name."""

    def __post_init__(self) -> None:
        for annotation in self.stands_for:
            _by_annotation[annotation] = self

    @property
    def _kind(self) -> Kind:
        return Kind(self.kind, self.makes, self.given, self.remedy)

    @property
    def names(self) -> list[str]:
        """All names, without plug-ins."""
        return list(dict.fromkeys([*self.table, *self._registered]))

    def parse(self, text: str, defaults: Mapping[str, Any] | None = None) -> Part[T]:
        """Return the part that a string stands for.

        Args:
            text: a name, or ``name(argument=value, ...)``.
            defaults: for arguments that it omits; a part that does not take one ignores it.
        """
        return self.bind(self.read(text), defaults)

    def read(self, text: str) -> Call:
        """Parse a string, without a lookup."""
        try:
            return calls.read(text)
        except ValueError:
            quotes = " or 'my parts.py':name, in quotes for the space" if " " in text else ""
            quotes = " or parts.py:name" if text.endswith(".py") else quotes
            raise UserError(
                f"{a(self.kind)} is a name or name(argument=value, ...), each argument once, got "
                f"{text[:80]!r}; for instance {self.example}{quotes}"
            ) from None

    def bind(self, call: Call, defaults: Mapping[str, Any] | None = None) -> Part[T]:
        """Return the part that a call stands for."""
        build, plugin = self._look_up(call.name)
        try:
            parameters = Parameters(
                plugin.label if plugin else call.name,
                build,
                given=self.given,
                reserved=self.reserved,
                example="" if plugin else self.example_of(call.name) or "",
            )
        except (TypeError, ValueError) as error:
            raise self._kind.unusable(plugin.label if plugin else call.name, build) from error
        own = parameters.bind(call.positional, call.named)
        filled = {key: value for key, value in (defaults or {}).items() if key in parameters.names}
        bound = Bound(filled | own.by_name, own.rest)
        parameters.check_complete(bound)
        used: dict[str, PlugIn] = {call.name: plugin} if plugin else {}
        converted = parameters.convert(bound, _Nested(self, used))
        for name in call.names - used.keys():
            if plugins.is_plugin(name):  # a string, which the part may look up itself
                used[name] = plugins.load(name)
        written = {key: with_booleans(value) for key, value in bound.by_name.items()}
        return Part(self._kind, Call(call.name, bound.rest, written), used, parameters, converted)

    def unknown(self, name: str, names: Iterable[str]) -> UserError:
        """Return the error for an unknown name."""
        known = list(names)
        hint = self.instead.get(name, f"choose from {', '.join(known)}")
        return UserError(
            f"unknown {self.kind} {quoted(name)}{nearest_in_brackets(name, known)}; {hint}"
        )

    def has(self, name: str) -> bool:
        """Return whether a name, or a plug-in's, may be looked up here."""
        return name in self.table or plugins.is_plugin(name) or name in self._registered

    def may_make(self, name: str, wanted: Any) -> bool:
        """Return whether a name may stand for a part of this type; True where unknown."""
        promised = promise_of(self.build_of(self.table[name])) if name in self.table else None
        return promised is None or self.given > 0 or is_subclass(promised, (wanted,))

    @property
    def _registered(self) -> dict[str, Callable[[], PlugIn]]:
        return plugins.registered(self.group)

    def _look_up(self, name: str) -> tuple[Callable[..., Any], PlugIn | None]:
        if name in self.table:
            return self.build_of(self.table[name]), None
        if plugins.is_plugin(name):
            plugin = plugins.load(name)
        elif name in self._registered:
            plugin = self._registered[name]()
        else:
            raise self.unknown(name, self.names)
        self._kind.check_plugin(plugin)
        return plugin.part, plugin


_by_annotation: dict[Any, Registry[Any]] = {}
"""Where parameters with an annotation look their parts up."""


@final
@dataclass(frozen=True)
class _Nested:
    """Makes arguments that are parts, and remembers the plug-ins that they come from."""

    registry: Registry[Any]
    """Whose part has the arguments."""

    used: dict[str, PlugIn]

    def knows(self, wanted: Any) -> bool:
        try:
            return wanted in _by_annotation
        except TypeError:  # an annotation that has no hash
            return False

    def make(self, value: Any, wanted: Any) -> Any:
        registry = _by_annotation[wanted]
        call = Call(value) if isinstance(value, Name) else value
        if isinstance(call, Call) and registry.has(call.name):
            made = self._make(registry, call)
            if registry.given or isinstance(made, wanted):
                return made
        # A kind with several annotations, as targets and policies, has a noun for each.
        noun = registry.kind if len(registry.stands_for) == 1 else wanted.__name__.lower()
        name = call.name if isinstance(call, Call) else ""
        names = [
            known for known in registry.names if known != name and registry.may_make(known, wanted)
        ]
        hint = nearest_in_brackets(name, names) if not registry.has(name) else ""
        raise Unfit(a(noun), hint, f"choose from {', '.join(names)}")

    def make_any(self, value: Call | Name) -> Any:
        """Return a part of the same kind, where the name is one of them; or a plain string."""
        call = Call(value) if isinstance(value, Name) else value
        if self.registry.given == 0 and self.registry.has(call.name):
            return self._make(self.registry, call)
        if isinstance(value, Name):
            return literal(value)
        raise Unfit("a plain value")

    def _make(self, registry: Registry[Any], call: Call) -> Any:
        part = registry.bind(call)
        self.used.update(part.plugins)
        return part.value
