"""Commands whose help shows a flag as it is typed: typer writes <bool> after one, as of a value."""

from __future__ import annotations

from typing import Any, final

from typer.core import TyperCommand, TyperGroup


@final
class Verb(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters, --help among them."""
        return _plain(super().get_params(ctx))


@final
class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters, --help among them."""
        return _plain(super().get_params(ctx))


def _plain(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return parameters
