"""Strict validation of values from files; errors are one line and suggest the nearest key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gossamer.errors import UserError, nearest, quoted

_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], given: Mapping[str, Any], where: str) -> _Model:
    """Validate a mapping as a model, without conversions between types.

    Args:
        model: the type of the result.
        given: its fields.
        where: its name in errors.
    """
    try:
        return model.model_validate(dict(given), strict=True)
    except ValidationError as error:
        # A misspelt key comes first: it is the cause of a missing one.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            raise type(cause)(f"{where}: {cause}") from cause
        key = ".".join(str(part)[:80] for part in first["loc"])
        if first["type"] == "extra_forbidden":
            hint = nearest(str(first["loc"][-1]), model.model_fields)
            raise UserError(f"{where} has no key {key!r}; {hint}") from None
        got = f", got {quoted(first['input'])}" if first["type"] != "missing" else ""
        raise UserError(f"{where}: {key}: {first['msg']}{got}") from None
