"""What a string stands for, and what makes it one of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

from gossamer.errors import UserError
from gossamer.registry.arguments import Bound, Parameters, promise_of
from gossamer.registry.calls import Call
from gossamer.registry.plugins import PlugIn, PlugInError, described

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Kind:
    """What all parts of one registry have in common."""

    noun: str
    types: tuple[Any, ...]
    """Types, one of which a part must have; any where there are none."""

    given: int
    """How many leading arguments the caller fills, not the string."""

    remedy: str
    """What the author of a plug-in that is not of this kind can do."""

    def check(self, made: Any, label: str) -> Any:
        """Return what was made, after a check that it is of this kind."""
        if self.types and not isinstance(made, self.types):
            raise self._refusal(f"{a(type(made).__name__)} from {label}")
        return made

    def check_plugin(self, plugin: PlugIn) -> None:
        """Raise where a plug-in cannot make such a part, before it is called."""
        if not callable(plugin.part):
            raise self.unusable(plugin.label, plugin.part)
        promised = promise_of(plugin.part)
        if promised is not None and self.types and not is_subclass(promised, self.types):
            raise self._refusal(f"{plugin.label}, which makes {a(promised.__name__)}")

    def unusable(self, label: str, part: Any) -> PlugInError:
        """Return what to raise where something cannot be called with arguments."""
        return PlugInError(
            f"{a(self.noun)} must be a function or a class, got {label}, which is "
            f"{a(type(part).__name__)}; name one"
        )

    def _refusal(self, got: str) -> PlugInError:
        wanted = " or ".join(a(each.__name__) for each in self.types)
        return PlugInError(f"{a(self.noun)} must be {wanted}, got {got}; {self.remedy}")


@final
@dataclass(frozen=True, eq=False)
class Part(Generic[T]):
    """What a string stands for, bound to its arguments and not built yet."""

    kind: Kind
    call: Call
    """As it was written, with positional arguments given by name where they have one."""

    plugins: Mapping[str, PlugIn]
    """The plug-ins that it and its arguments come from, by their names in the string."""

    _parameters: Parameters
    _bound: Bound

    @property
    def name(self) -> str:
        """The canonical string, without the folders of plug-in files."""
        return str(self.call.renamed(self._label))

    @property
    def identity(self) -> str:
        """The canonical string, with digests of plug-ins' sources instead of their paths."""
        return str(self.call.renamed(self._source))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the string, by name, converted."""
        return self._bound.by_name

    @property
    def description(self) -> str:
        """The first line of its docstring."""
        return self._parameters.doc.partition("\n")[0]

    @property
    def value(self) -> Any:
        """Its value as an argument: the part, or a function of the arguments the caller fills."""
        return self.make if self.kind.given else self.make()

    def make(self, *given: Any, **others: Any) -> T:
        """Return the part.

        Args:
            given: the first arguments of its function.
            others: arguments by name that the string does not have.
        """
        own = self.plugins.get(self.call.name)
        try:
            made = self._parameters.call(given, self._bound, others)
        except UserError:
            raise
        except Exception as error:
            if own is None:
                raise
            raise PlugInError(
                f"{own.label} must make {a(self.kind.noun)}, got {described(error)}; correct it"
            ) from error
        return self.kind.check(made, own.label if own else self.call.name)

    def _label(self, name: str) -> str:
        return self.plugins[name].label if name in self.plugins else name

    def _source(self, name: str) -> str:
        if name not in self.plugins:
            return name
        return f"{name.rpartition(':')[2]}@{self.plugins[name].digest}"


def is_subclass(promised: type, types: tuple[Any, ...]) -> bool:
    """Return whether a class is one of these types, as far as one can tell."""
    try:
        return issubclass(promised, types)
    except TypeError:  # a protocol with data members: the instance is checked
        return True


def a(noun: str) -> str:
    """Return a noun with its article."""
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"
