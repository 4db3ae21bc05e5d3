"""Values from files, checked strictly: what is wrong is one line that names the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gossamer.errors import UserError

_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], given: Mapping[str, Any], where: str) -> _Model:
    """Return the value that a mapping holds.

    Args:
        model: what it is to be.
        given: its fields.
        where: what an error calls it.
    """
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise UserError(
                f"{where} has no key {key!r}; {nearest(key, model.model_fields)}"
            ) from None
        got = f", got {first['input']!r}" if first["type"] != "missing" else ""
        raise UserError(f"{where}: {key or 'all of it'}: {first['msg']}{got}") from None


def nearest(name: str, known: Any) -> str:
    """Return a hint at what was meant."""
    match = difflib.get_close_matches(name.rpartition(".")[2], list(known), n=1, cutoff=0.5)
    return f"did you mean {match[0]!r}?" if match else f"choose from {', '.join(known)}"
