"""States as data: numbers, strings, lists and dicts, which checkpoints and JSON can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch

Value = TypeVar("Value")


def to_data(value: Any) -> Any:
    """Return a dataclass, and those in its fields, as a dict; everything else as it is."""
    if not is_dataclass(value):
        return value
    return {entry.name: to_data(getattr(value, entry.name)) for entry in fields(value)}


def from_data(like: Value, data: Any) -> Value:
    """Return the dataclass that ``to_data`` converted.

    Args:
        like: one of the same type, which gives the types of fields, and the values of missing ones.
        data: what ``to_data`` returned; tuples may have become lists, as in JSON.
    """
    restored: Any = data
    if is_dataclass(like):
        names = [entry.name for entry in fields(like) if entry.name in data]
        values = {name: from_data(getattr(like, name), data[name]) for name in names}
        restored = replace(cast("Any", like), **values)
    elif isinstance(like, tuple):
        restored = tuple(data)
    return restored


def digest_of_data(data: Any) -> str:
    """Return a short hash of data, equal in every process, for comparing states across ranks."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, data)
    return digest.hexdigest()


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _feed(digest: _Hash, data: Any) -> None:
    if isinstance(data, Mapping):
        for key, item in cast("Mapping[str, Any]", data).items():
            digest.update(f"{key}:".encode())
            _feed(digest, item)
    elif isinstance(data, str) or data is None:
        digest.update(repr(data).encode())
    elif isinstance(data, torch.Tensor):
        digest.update(data.numpy(force=True).tobytes())
    else:
        # Hash the bytes: the repr of the sketches that some states hold would take milliseconds.
        try:
            digest.update(np.asarray(data, dtype=np.float64).tobytes())
        except (TypeError, ValueError):  # a sequence of other things
            for item in data:
                _feed(digest, item)
