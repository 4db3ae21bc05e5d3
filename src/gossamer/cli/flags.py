"""Base classes of all commands.

Help shows a flag as it is typed, without typer's <bool>. An option that needs a path raises on a
following option instead of taking it as the path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from typer.core import TyperCommand, TyperGroup

from gossamer.errors import UserError


@final
class Verb(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters, --help among them."""
        return _plain(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; raise on an option that was given instead of a path."""
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:  # completion parses incomplete lines
            for each in self.params:
                _check_path(each, ctx.params.get(each.name))
        return rest


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


def _check_path(parameter: Any, value: object) -> None:
    # Arguments need no check: typer takes what begins so for an option, except after --.
    is_option = isinstance(value, Path) and parameter.param_type_name == "option"
    if is_option and str(value).startswith("-"):
        raise UserError(
            f"{parameter.opts[0]} needs a path, got {str(value)!r}, which looks like an option; "
            "write the path after it, or an absolute path if it is a file"
        )
